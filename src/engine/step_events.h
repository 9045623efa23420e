#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "engine/schedule.h"
#include "engine/unit.h"
#include "events/event.h"
#include "memory/accounting.h"

namespace fsdp::engine {

/// Records an engine's events: the beginning and end of steps and backwards, the unit of the computation, and the memory that the engine
/// holds. Called under the engine's lock.
class StepEvents {
 public:
  StepEvents(std::uint32_t source, memory::Accounting& accounting) : source_(source), accounting_(accounting) {}

  /// A forward begins. It begins a step if the backward before it was the last of one. `units` have the communicators whose bytes count.
  void forward_begins(std::span<const std::unique_ptr<Unit>> units);
  /// The computation moved to the unit.
  void entered(const Unit& unit, Pass pass);
  void backward_began();
  /// `last`: whether it was the last backward before an update.
  void backward_ended(bool last);
  /// With false, even the last backward before an update does not end the step.
  void set_ends_step(bool ends) { ends_step_ = ends; }

  /// The last units that were entered, newest first, in quotes, for error messages. Empty if there are none.
  std::string last_units() const;

 private:
  enum class Told : std::uint8_t { kChanges, kAll };

  /// What is held now, by kind.
  void note_memory(Told told);
  void note_peak();
  /// The most that the step has held, by kind.
  void note_peaks_of_kinds();
  void record(events::Event event) const noexcept;

  const std::uint32_t source_;
  memory::Accounting& accounting_;
  std::uint64_t steps_ = 0;  ///< How many have ended.
  bool step_ended_ = true;
  bool ends_step_ = true;
  std::uint32_t unit_ = 0;                                         ///< Where the computation is, by name.
  std::int64_t peak_ = 0;                                          ///< Bytes, of this step.
  std::array<std::int64_t, events::kMemoryKinds.size()> held_{};   ///< As in the last event, by kind.
  std::array<std::int64_t, events::kMemoryKinds.size()> peaks_{};  ///< Likewise, of this step.
};

}  // namespace fsdp::engine
