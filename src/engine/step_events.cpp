#include "engine/step_events.h"

#include "engine/wire_stats.h"
#include "events/event_ring.h"

namespace fsdp::engine {

using events::EventKind;

void StepEvents::record(events::Event event) const noexcept {
  if (source_ == 0) return;
  event.source = source_;
  events::record(event);
}

void StepEvents::record_with_memory(events::Event event) const noexcept {
  event.bytes = accounting_.live();
  event.number = static_cast<std::uint64_t>(accounting_.live(memory::Kind::kGatheredParameters));
  record(event);
}

void StepEvents::forward_begins(std::span<const std::unique_ptr<Unit>> units) {
  if (!step_ended_) return;
  step_ended_ = false;
  std::int64_t sent = 0;
  std::int64_t read_by_peers = 0;
  for (const auto* communicator : communicators_of(units)) {
    const auto& stats = communicator->stats();
    sent += bytes_of(stats);
    read_by_peers += stats.shared_memory_bytes;
  }
  record({.bytes = sent, .number = static_cast<std::uint64_t>(read_by_peers), .kind = EventKind::kStepBegan});
  accounting_.begin_step();
  unit_ = 0;
  peak_ = 0;
  note_peak();
}

void StepEvents::entered(const Unit& unit, Pass pass) {
  const auto next = events::name_of(unit.name);
  record_with_memory({.unit = next, .kind = EventKind::kEntered, .in_backward = pass == Pass::kBackward});
  note_peak();  // of the unit before
  unit_ = next;
}

void StepEvents::backward_began() {
  note_peak();
  record_with_memory({.kind = EventKind::kBackwardBegan, .in_backward = true});
}

void StepEvents::backward_ended(bool last) {
  note_peak();
  if (last) ++steps_;
  record({.bytes = accounting_.live(), .number = last ? steps_ : 0, .kind = EventKind::kBackwardEnded});
  step_ended_ = last;
  unit_ = 0;
}

void StepEvents::note_peak() {
  const auto peak = accounting_.peak_of_step();
  if (peak <= peak_) return;
  peak_ = peak;
  record({.bytes = peak, .unit = unit_, .kind = EventKind::kMemoryPeaked});
}

std::string StepEvents::last_units() const {
  constexpr int kShown = 8;
  const auto all = events::recorded();
  std::string text;
  int shown = 0;
  for (auto event = all.rbegin(); event != all.rend() && shown < kShown; ++event) {
    if (event->source != source_ || event->kind != EventKind::kEntered) continue;
    text += std::string(shown == 0 ? "'" : ", '") + std::string(events::text_of(event->unit)) + "'";
    ++shown;
  }
  return text;
}

}  // namespace fsdp::engine
