#include "report/timeline_files.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::report {

Timeline read_timeline(const std::filesystem::path& folder, const std::optional<StepRange>& steps, std::vector<std::string>& left_out) {
  auto run = read_run(folder);
  left_out = std::move(run.left_out);
  return timeline_of(std::move(run.ranks), steps);
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

/// What counts most: waits in vain, and of these the ones for the first cause, not its own; then waits of steps that are whole; then what
/// comes after training.
int weight_of(const RankTimeline& rank, const CollectiveSpan& wait, std::int64_t first_cause) {
  if (is_unfinished(wait)) return rank.writer.rank == first_cause ? 2 : 3;
  return std::any_of(rank.steps.begin(), rank.steps.end(), [&](const StepSpan& step) {
    return step.is_whole && wait.times.wait_began >= step.began && wait.times.wait_began < step.ended;
  });
}

}  // namespace

std::string longest_wait(const Timeline& timeline) {
  RankWait found;
  std::pair<int, std::int64_t> most{0, 0};
  for (const auto& rank : timeline.ranks) {
    for (const auto& wait : rank.collectives) {
      const std::pair<int, std::int64_t> much{weight_of(rank, wait, timeline.why.rank), waited(wait)};
      if (much <= most || (waited(wait) == 0 && !is_unfinished(wait))) continue;
      most = much;
      found = {.rank = &rank, .wait = &wait};
    }
  }
  const auto* longest = found.wait;
  if (longest == nullptr) return {};
  constexpr double kNsPerMs = 1e6;
  const auto ms = with_decimals(static_cast<double>(waited(*longest)) / kNsPerMs, 2) + " ms";
  const auto& unit = timeline.names[longest->unit];
  const auto reason = std::max_element(longest->reasons.begin(), longest->reasons.end()) - longest->reasons.begin();
  const auto why = static_cast<WaitReason>(reason);
  return "rank " + std::to_string(found.rank->writer.rank) + " waited " + ms + " for the " + timeline.names[longest->operation] +
         (unit.empty() ? "" : " of '" + unit + "'") + ": " +
         (longest->late_rank >= 0 && (why == WaitReason::kLateRank || is_unfinished(*longest))
              ? "rank " + std::to_string(longest->late_rank) + " was " + timeline.names[longest->late_rank_was]
          : is_unfinished(*longest) ? "it did not end"
                                    : std::string(to_string(why)));
}

std::string title_of(const std::filesystem::path& folder) {
  const auto path = folder.lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).string();
}

}  // namespace fsdp::report
