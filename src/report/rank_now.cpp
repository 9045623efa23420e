#include "report/rank_now.h"

#include <algorithm>
#include <utility>

#include "events/row_name.h"

namespace fsdp::report {

namespace {

std::vector<events::Event> in_clock(std::vector<events::Event> all, const ClockOffset& clock) {
  for (auto& event : all) event.time -= clock.ahead;
  return all;
}

}  // namespace

RankNow::RankNow(RankEvents events, const ClockOffset& ahead)
    : RankReplay(in_clock(std::move(events.events), ahead), [&](std::uint32_t name) { return events.text_of(name); }),
      left(std::move(events)),
      clock(ahead) {
  for (std::uint32_t source = 0; source < left.sources.size(); ++source) {
    const auto& row = left.sources[source];
    if (!events::ranks_of_row(row).empty()) rows_[row] = {.source = source, .last = last_call(source)};
  }
  for (const auto& key : open_waits) {
    if (rows_.contains(row_of(key.first))) waits.emplace(which(key), collectives.at(key).wait_began);
  }
  if (first_failure) {
    failure = {.time = first_failure->time, .text = std::string(text_of(first_failure->text)), .in = {}};
    if (first_failure->in && rows_.contains(row_of(first_failure->in->first))) failure->in = which(*first_failure->in);
  }
  last_sign = lives(left) ? events::now() - clock.ahead : std::max(last_event, left.alive - clock.ahead);
}

std::vector<const Collective*> RankNow::calls(const std::string& row) const {
  std::vector<const Collective*> made;
  const auto found = rows_.find(row);
  if (found == rows_.end()) return made;
  for (auto entry = collectives.lower_bound({found->second.source, 0}); entry != collectives.end(); ++entry) {
    if (entry->first.first != found->second.source) break;
    if (entry->second.posted != 0) made.push_back(&entry->second);
  }
  return made;
}

const Collective* RankNow::call(const RowNumber& which) const {
  const auto row = rows_.find(which.row);
  if (row == rows_.end()) return nullptr;
  const auto found = collectives.find({row->second.source, which.number});
  return found == collectives.end() || found->second.posted == 0 ? nullptr : &found->second;
}

bool RankNow::has_called(const RowNumber& which) const {
  const auto row = rows_.find(which.row);
  return row != rows_.end() && row->second.last >= which.number && row->second.last > 0;
}

std::string RankNow::text_of(const Collective& collective) const {
  return events::call_text(text_of(collective.call.operation), text_of(collective.call.unit));
}

bool RankNow::are_alike(const Collective& collective, const RankNow& other, const Collective& others) const {
  const auto& call = collective.call;
  return call.bytes == others.call.bytes && text_of(call.operation) == other.text_of(others.call.operation) &&
         text_of(call.unit) == other.text_of(others.call.unit);
}

std::vector<RankNow> ranks_of(std::vector<RankEvents> run) {
  const auto clocks = clock_offsets(run);
  std::vector<RankNow> ranks;
  for (std::size_t i = 0; i < run.size(); ++i) ranks.emplace_back(std::move(run[i]), clocks[i]);
  return ranks;
}

}  // namespace fsdp::report
