#include "report/rank_now.h"

#include <algorithm>
#include <set>
#include <utility>

#include "events/row_name.h"

namespace fsdp::report {

using events::Event;
using events::EventKind;

namespace {

std::vector<std::uint32_t> engines_of(const std::vector<Event>& events) {
  std::map<std::uint32_t, int> steps;
  events::Whereabouts whereabouts;
  for (const auto& event : events) {
    if (whereabouts.take(event)) steps[event.source] += event.kind == EventKind::kStepBegan ? 1 : 0;
  }
  std::vector<std::uint32_t> engines;
  for (const auto& [source, count] : steps) engines.push_back(source);
  std::stable_sort(engines.begin(), engines.end(), [&](auto a, auto b) { return steps[a] > steps[b]; });
  if (engines.empty()) engines.push_back(0);
  return engines;
}

std::map<CollectiveKey, Collective> collectives_of_all(const RankNow& rank) {
  const auto text_of = [&](std::uint32_t name) { return rank.text_of(name); };
  const auto& events = rank.left.events;
  auto all = collectives_of(events, rank.engines.front(), text_of);
  for (std::size_t i = 1; i < rank.engines.size(); ++i) {
    std::set<std::uint32_t> units;
    for (const auto& event : events) {
      if (event.source == rank.engines[i] && event.kind == EventKind::kEntered) units.insert(event.unit);
    }
    for (const auto& event : events) {
      if (event.source == rank.engines.front() && event.kind == EventKind::kEntered) units.erase(event.unit);
    }
    for (auto& [key, collective] : collectives_of(events, rank.engines[i], text_of)) {
      if (units.contains(collective.call.unit)) all[key] = collective;
    }
  }
  return all;
}

}  // namespace

RankNow::RankNow(RankEvents events, const ClockOffset& ahead) : left(std::move(events)), clock(ahead) {
  for (auto& event : left.events) event.time -= clock.ahead;
  engines = engines_of(left.events);
  collectives = collectives_of_all(*this);
  for (std::uint32_t source = 0; source < left.sources.size(); ++source) {
    if (!events::ranks_of_row(left.sources[source]).empty()) rows_[left.sources[source]].source = source;
  }
  for (const auto& [key, collective] : collectives) {
    const auto row = rows_.find(row_of(key.first));
    if (row == rows_.end()) continue;
    if (collective.posted != 0) row->second.last = key.second;
    if (collective.is_awaited()) waits.emplace(which(key), collective.wait_began);
  }
  for (const auto& event : left.events) take(event);
  last_sign = lives(left) ? events::now() - clock.ahead : std::max(last_event, left.alive - clock.ahead);
}

void RankNow::take(const Event& event) {
  last_event = event.time;
  if (whereabouts.take(event) || event.kind == EventKind::kPosted) last_move = event.time;
  const auto is_of_row = [&] { return rows_.contains(row_of(event.source)); };
  if (event.kind == EventKind::kStepBegan) {
    failure.reset();  // It has gone on.
  } else if (event.kind == EventKind::kFailed && is_of_row()) {
    fail({.time = event.time, .text = {}, .in = which({event.source, event.number})});
  } else if (event.kind == EventKind::kGivenUp && is_of_row()) {
    fail({.time = event.time, .text = std::string(text_of(event.operation)), .in = which({event.source, 0})});
  } else if (event.kind == EventKind::kEnded && !end) {
    end = static_cast<events::EndKind>(event.number);
    end_text = text_of(event.operation);
    if (end == events::EndKind::kException) fail({.time = event.time, .text = end_text, .in = {}});
  }
}

/// The first failure is the one that counts. Its row and its text come in two events, in either order; a failure without a text has that of
/// the exception that ends the program.
void RankNow::fail(Failure next) {
  if (!failure) {
    failure = std::move(next);
    return;
  }
  if (failure->text.empty() && (!next.in || !failure->in || next.in->row == failure->in->row)) failure->text = next.text;
  if (failure->in && next.in && failure->in->number == 0 && next.in->row == failure->in->row) failure->in->number = next.in->number;
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
  const auto operation = text_of(collective.call.operation);
  return (operation.empty() ? "a collective" : "the " + std::string(operation)) + events::of_unit_text(text_of(collective.call.unit));
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
