#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine.h"
#include "engine/step_observer.h"

namespace fsdp::engine {

/// What an observer sees. In a rehearsal, backwards give nothing: their gradients are shown to the observer and dropped, and gradients,
/// reduced or not, that the engine had before are as they were when it has ended. Units are gathered and freed as ever.
enum class ObservationOf : std::uint8_t { kTraining, kRehearsal };

/// While it exists, an observer sees what an engine works with. Make and destroy it between steps, on all ranks alike; an exception may
/// have ended the backward. Only one exists at a time.
class Observation {
 public:
  /// Waits for reductions under way.
  Observation(Engine& engine, StepObserver& observer, ObservationOf of);
  ~Observation();
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

 private:
  /// What a rehearsal would change of a unit.
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
