#include "report/timeline_files.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "base/classic_stream.h"
#include "fsdp/error.h"

namespace fsdp::report {

Timeline read_timeline(const std::filesystem::path& folder, const std::optional<StepRange>& steps, std::vector<std::string>& unreadable) {
  return timeline_of(read_all_events(folder, unreadable), steps);
}

StepRange parse_steps(const std::string& text) {
  StepRange steps;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, steps.first);
  steps.second = steps.first;
  auto last = first;
  if (first.ec == std::errc() && first.ptr != end && *first.ptr == '-') last = std::from_chars(first.ptr + 1, end, steps.second);
  if (last.ec != std::errc() || last.ptr != end || steps.first < 1 || steps.second < steps.first) {
    throw Error("--steps '" + text + "' is no range of steps: give the first and the last one, as in 12-14, or one number");
  }
  return steps;
}

namespace {

struct RankWait {
  const RankTimeline* rank = nullptr;
  const CollectiveSpan* wait = nullptr;
};

/// Of a step that is whole, or of what has not ended well; not of what comes after training.
bool is_of_training(const RankTimeline& rank, const CollectiveSpan& wait) {
  return wait.state != CollectiveSpan::State::kDone || std::any_of(rank.steps.begin(), rank.steps.end(), [&](const StepSpan& step) {
           return step.is_whole && wait.times.wait_began >= step.began && wait.times.wait_began < step.ended;
         });
}

RankWait longest_of(const Timeline& timeline, bool of_training) {
  RankWait longest;
  for (const auto& rank : timeline.ranks) {
    for (const auto& wait : rank.collectives) {
      if (waited(wait) <= (longest.wait == nullptr ? 0 : waited(*longest.wait)) || (of_training && !is_of_training(rank, wait))) continue;
      longest = {.rank = &rank, .wait = &wait};
    }
  }
  return longest;
}

}  // namespace

std::string longest_wait(const Timeline& timeline) {
  auto found = longest_of(timeline, true);
  if (found.wait == nullptr) found = longest_of(timeline, false);
  const auto* longest = found.wait;
  if (longest == nullptr) return {};
  constexpr double kNsPerMs = 1e6;
  const auto ms = with_decimals(static_cast<double>(waited(*longest)) / kNsPerMs, 2) + " ms";
  const auto& unit = timeline.names[longest->unit];
  const auto reason = std::max_element(longest->reasons.begin(), longest->reasons.end()) - longest->reasons.begin();
  const auto why = static_cast<WaitReason>(reason);
  return "rank " + std::to_string(found.rank->writer.rank) + " waited " + ms + " for the " + timeline.names[longest->operation] +
         (unit.empty() ? "" : " of '" + unit + "'") + ": " +
         (why == WaitReason::kLateRank ? "rank " + std::to_string(longest->late_rank) + " was " + timeline.names[longest->late_rank_was]
                                       : std::string(to_string(why)));
}

std::string title_of(const std::filesystem::path& folder) {
  const auto path = folder.lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).string();
}

}  // namespace fsdp::report
