#include "comm/collectives/rank_progress.h"

#include <algorithm>

#include "events/whereabouts.h"

namespace fsdp::comm {

using events::EventKind;

RankProgress progress_of(std::span<const events::Event> events, const std::function<std::string_view(std::uint32_t name)>& text_of,
                         const std::map<std::uint32_t, std::string>& rows) {
  RankProgress progress;
  events::Whereabouts whereabouts;
  int waits = 0;
  for (const auto& event : events) {
    whereabouts.take(event);
    if (event.kind == EventKind::kWaitBegan) ++waits;
    if (event.kind == EventKind::kWaitEnded || event.kind == EventKind::kFailed) waits = std::max(waits - 1, 0);
    if (event.kind != EventKind::kPosted) continue;
    if (const auto row = rows.find(event.source); row != rows.end()) progress.last_numbers[row->second] = event.number;
  }
  progress.waits = waits > 0;
  progress.activity = whereabouts.describe(text_of(whereabouts.unit()));
  return progress;
}

}  // namespace fsdp::comm
