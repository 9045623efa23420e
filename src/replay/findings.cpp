#include "replay/findings.h"

#include <algorithm>
#include <cstddef>
#include <map>

namespace fsdp::replay {

Verdict decide(std::span<const Vote> votes) {
  std::map<std::int64_t, std::size_t> counts;
  for (const auto& vote : votes) ++counts[vote.value];
  Verdict verdict;
  verdict.agreed = counts.size() <= 1;
  const auto most = std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  // If two votes differ, neither has more than half; this also holds for a tie of four.
  verdict.decided = !verdict.agreed && most->second * 2 > votes.size();
  const auto add = [](std::vector<std::int64_t>& ranks, std::int64_t rank) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
  };
  for (const auto& vote : votes) {
    if (verdict.decided && vote.value != most->first) add(verdict.wrong, vote.rank);
  }
  for (const auto& vote : votes) {
    if (std::find(verdict.wrong.begin(), verdict.wrong.end(), vote.rank) == verdict.wrong.end()) add(verdict.right, vote.rank);
  }
  return verdict;
}

}  // namespace fsdp::replay
