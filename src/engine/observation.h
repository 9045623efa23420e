#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine.h"
#include "engine/step_observer.h"

namespace fsdp::engine {

/// Whether backwards give gradients. In a rehearsal they do not: their gradients are passed to the observer and dropped, and when it has
/// ended, the engine has the gradients, reduced or not, that it had before. Units are gathered and freed as always.
enum class ObservationOf : std::uint8_t { kTraining, kRehearsal };

/// Connects an observer with an engine while it exists. Make and destroy it between steps, on all ranks alike; an exception may have ended
/// the backward. Only one exists at a time.
class Observation {
 public:
  /// Waits for reductions under way.
  Observation(Engine& engine, StepObserver& observer, ObservationOf of);
  ~Observation();
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

 private:
  /// The state of a unit that a rehearsal would change.
  struct UnitBefore {
    bool requires_gradient_sync;
    LastBackward last_backward;
    std::vector<bool> has_gradient;  ///< By parameter.
  };

  void begin_rehearsal();
  void end_rehearsal();
  void set_observer(StepObserver* observer);

  Engine& engine_;
  const ObservationOf of_;
  std::vector<UnitBefore> units_;
  bool is_last_backward_ = true;
  bool manual_finalization_ = false;
};

}  // namespace fsdp::engine
