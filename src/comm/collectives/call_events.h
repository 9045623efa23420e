#pragma once

#include <exception>

#include "comm/call.h"
#include "comm/communicator.h"
#include "events/event_ring.h"

namespace fsdp::comm {

/// Writes the events of one collective.
class CallEvents {
 public:
  /// `row`: the row's source of events.
  CallEvents(std::uint32_t row, const Call& call, const Label& label)
      : event_{.bytes = call.bytes,
               .number = call.number,
               .source = row,
               .unit = events::name_of(label.unit),
               .operation = events::name_of(label.operation)} {}

  /// An event without a kind.
  const events::Event& event() const noexcept { return event_; }

  void record(events::EventKind kind) const noexcept {
    auto event = event_;
    event.kind = kind;
    events::record(event);
  }

 private:
  events::Event event_;
};

/// The events of a collective that blocks, from its construction to its destruction.
class BlockingCallEvents {
 public:
  BlockingCallEvents(std::uint32_t row, const Call& call, const Label& label) : events_(row, call, label) {
    events_.record(events::EventKind::kPosted);
    events_.record(events::EventKind::kWaitBegan);
  }
  ~BlockingCallEvents() {
    events_.record(std::uncaught_exceptions() > exceptions_ ? events::EventKind::kFailed : events::EventKind::kWaitEnded);
  }
  BlockingCallEvents(const BlockingCallEvents&) = delete;
  BlockingCallEvents& operator=(const BlockingCallEvents&) = delete;

 private:
  const CallEvents events_;
  const int exceptions_ = std::uncaught_exceptions();
};

}  // namespace fsdp::comm
