#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "report/event_files.h"

namespace fsdp::testing {

/// Times of a collective; 0: there is no such event.
struct CallTimes {
  std::int64_t posted = 0;
  std::int64_t wait_began = 0;
  std::int64_t arrived = 0;
  std::int64_t wait_ended = 0;
};

/// What a rank would leave, as read_events() gives it, with events at times that a test says. Its engine is source 1, its row source 2.
class SyntheticRank {
 public:
  SyntheticRank(std::int64_t rank, std::int64_t world_size) {
    rank_.writer.rank = rank;
    rank_.writer.world_size = world_size;
    rank_.writer.clock = 1;
    std::strcpy(rank_.writer.host.data(), "host");
    rank_.names = {""};
    rank_.sources = {"", "model #1", "dp_shard 0-" + std::to_string(world_size - 1) + " #1"};
  }

  /// `sent` and `read_by_peers`: bytes so far.
  SyntheticRank& step(std::int64_t time, std::int64_t sent = 0, std::uint64_t read_by_peers = 0) {
    return add({.time = time, .bytes = sent, .number = read_by_peers, .source = engine_, .kind = events::EventKind::kStepBegan});
  }
  SyntheticRank& enter(std::int64_t time, const std::string& unit, bool in_backward = false) {
    return add({.time = time, .source = engine_, .unit = name(unit), .kind = events::EventKind::kEntered, .in_backward = in_backward});
  }
  /// What is held of one kind of memory, told at a time.
  SyntheticRank& hold(std::int64_t time, std::uint64_t kind, std::int64_t bytes) {
    return add({.time = time, .bytes = bytes, .number = kind, .source = engine_, .kind = events::EventKind::kMemoryHeld});
  }
  SyntheticRank& hold_all(std::int64_t time, const std::array<std::int64_t, events::kMemoryKinds.size()>& held) {
    for (std::size_t kind = 0; kind < held.size(); ++kind) hold(time, kind, held[kind]);
    return *this;
  }
  /// The most of one kind in the step.
  SyntheticRank& peak_of_kind(std::int64_t time, std::uint64_t kind, std::int64_t bytes) {
    return add({.time = time, .bytes = bytes, .number = kind, .source = engine_, .kind = events::EventKind::kKindPeaked});
  }
  SyntheticRank& backward_began(std::int64_t time) {
    return add({.time = time, .source = engine_, .kind = events::EventKind::kBackwardBegan, .in_backward = true});
  }
  /// `step`: its number, or 0 if the step goes on.
  SyntheticRank& backward_ended(std::int64_t time, std::uint64_t step) {
    return add({.time = time, .number = step, .source = engine_, .kind = events::EventKind::kBackwardEnded});
  }
  SyntheticRank& peak(std::int64_t time, std::int64_t bytes, const std::string& unit) {
    return add({.time = time, .bytes = bytes, .source = engine_, .unit = name(unit), .kind = events::EventKind::kMemoryPeaked});
  }
  SyntheticRank& call(events::EventKind kind, std::int64_t time, std::uint64_t number, const std::string& unit,
                      const std::string& operation) {
    return add(
        {.time = time, .bytes = 1 << 20, .number = number, .source = row_, .unit = name(unit), .operation = name(operation), .kind = kind});
  }
  SyntheticRank& collective(const CallTimes& times, std::uint64_t number, const std::string& unit, const std::string& operation) {
    using events::EventKind;
    const std::array<std::pair<EventKind, std::int64_t>, 4> all = {{{EventKind::kPosted, times.posted},
                                                                    {EventKind::kWaitBegan, times.wait_began},
                                                                    {EventKind::kArrived, times.arrived},
                                                                    {EventKind::kWaitEnded, times.wait_ended}}};
    for (const auto& [kind, time] : all) {
      if (time != 0) call(kind, time, number, unit, operation);
    }
    return *this;
  }

  /// A row of which there are no events, unless it is there.
  void add_row(const std::string& row) {
    if (std::find(rank_.sources.begin(), rank_.sources.end(), row) == rank_.sources.end()) rank_.sources.push_back(row);
  }
  std::uint32_t add_source(const std::string& what) {
    rank_.sources.push_back(what);
    return static_cast<std::uint32_t>(rank_.sources.size() - 1);
  }
  /// The calls that follow are of this row.
  SyntheticRank& in_row(std::uint32_t row) {
    row_ = row;
    return *this;
  }
  /// What follows is of this engine.
  SyntheticRank& from(std::uint32_t engine) {
    engine_ = engine;
    return *this;
  }

  /// In time.
  report::RankEvents events() const {
    auto rank = rank_;
    std::stable_sort(rank.events.begin(), rank.events.end(), [](const auto& a, const auto& b) { return a.time < b.time; });
    return rank;
  }

 private:
  std::uint32_t name(const std::string& text) {
    const auto found = std::find(rank_.names.begin(), rank_.names.end(), text);
    if (found != rank_.names.end()) return static_cast<std::uint32_t>(found - rank_.names.begin());
    rank_.names.push_back(text);
    return static_cast<std::uint32_t>(rank_.names.size() - 1);
  }
  SyntheticRank& add(const events::Event& event) {
    rank_.events.push_back(event);
    return *this;
  }

  report::RankEvents rank_;
  std::uint32_t engine_ = 1;
  std::uint32_t row_ = 2;
};

}  // namespace fsdp::testing
