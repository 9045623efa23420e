#include "engine/step_events.h"

#include "engine/wire_stats.h"
#include "events/event_ring.h"

namespace fsdp::engine {

using events::EventKind;

namespace {

constexpr auto kKinds = events::kMemoryKinds.size();
static_assert(kKinds == static_cast<std::size_t>(memory::Kind::kHost), "host memory is the last kind, and the only one that is not told");

}  // namespace

void StepEvents::record(events::Event event) const noexcept {
  if (source_ == 0) return;
  event.source = source_;
  events::record(event);
}

void StepEvents::note_memory(Told told) {
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    const auto now = accounting_.live(static_cast<memory::Kind>(kind));
    if (told == Told::kChanges && now == held_[kind]) continue;
    held_[kind] = now;
    record({.bytes = now, .number = kind, .kind = EventKind::kMemoryHeld});
  }
}

void StepEvents::note_peaks_of_kinds() {
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    const auto peak = accounting_.peak_of_step(static_cast<memory::Kind>(kind));
    if (peak <= peaks_[kind]) continue;
    peaks_[kind] = peak;
    record({.bytes = peak, .number = kind, .kind = EventKind::kKindPeaked});
  }
}

void StepEvents::forward_begins(std::span<const std::unique_ptr<Unit>> units) {
  if (!step_ended_) return;
  step_ended_ = false;
  if (steps_ > 0) {  // The update may have needed more than the passes.
    note_peak();
    note_peaks_of_kinds();
  }
  std::int64_t sent = 0;
  std::int64_t read_by_peers = 0;
  for (const auto* communicator : communicators_of(units)) {
    const auto& stats = communicator->stats();
    sent += bytes_of(stats);
    read_by_peers += stats.shared_memory_bytes;
  }
  record({.bytes = sent, .number = static_cast<std::uint64_t>(read_by_peers), .kind = EventKind::kStepBegan});
  note_memory(Told::kAll);
  accounting_.begin_step();
  unit_ = 0;
  peak_ = 0;
  peaks_ = {};
  note_peak();
}

void StepEvents::entered(const Unit& unit, Pass pass) {
  const auto next = events::name_of(unit.name);
  record({.unit = next, .kind = EventKind::kEntered, .in_backward = pass == Pass::kBackward});
  note_memory(Told::kChanges);
  note_peak();  // of the unit before
  unit_ = next;
}

void StepEvents::backward_began() {
  note_peak();
  record({.kind = EventKind::kBackwardBegan, .in_backward = true});
  note_memory(Told::kAll);
}

void StepEvents::backward_ended(bool last) {
  note_peak();
  last = last && ends_step_;
  if (last) ++steps_;
  record({.number = last ? steps_ : 0, .kind = EventKind::kBackwardEnded});
  note_memory(Told::kChanges);
  if (last) note_peaks_of_kinds();
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
