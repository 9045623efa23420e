#include "engine/observation.h"

#include <ATen/core/grad_mode.h>

#include <utility>

namespace fsdp::engine {

Observation::Observation(Engine& engine, StepObserver& observer, ObservationOf of) : engine_(engine), of_(of) {
  const auto lock = engine_.lock_for_use();
  const at::NoGradGuard no_grad;
  engine_.guarded([&] { engine_.reducer_.drain(); });
  if (of_ == ObservationOf::kTraining) engine_.reducer_.begin_observation();
  if (of_ == ObservationOf::kRehearsal) begin_rehearsal();
  set_observer(&observer);
}

Observation::~Observation() {
  const auto lock = engine_.lock();
  set_observer(nullptr);
  if (of_ == ObservationOf::kRehearsal) end_rehearsal();
}

void Observation::set_observer(StepObserver* observer) {
  engine_.observer_ = observer;
  engine_.gatherer_.set_observer(observer);
  engine_.reducer_.set_observer(observer);
}

/// All units reduce, so that a rehearsal holds no more unreduced gradients than other backwards. It is no last backward, because no update
/// follows it: the step continues.
void Observation::begin_rehearsal() {
  engine_.reducer_.begin_rehearsal();
  for (const auto& unit : engine_.units_) {
    auto& before = units_.emplace_back(UnitBefore{unit->options.requires_gradient_sync, unit->whole.last_backward, {}});
    for (const auto& parameter : unit->parameters) before.has_gradient.push_back(parameter.has_gradient);
    unit->options.requires_gradient_sync = true;
  }
  is_last_backward_ = std::exchange(engine_.facts_.is_last_backward, false);
  manual_finalization_ = std::exchange(engine_.facts_.manual_finalization, false);
}

void Observation::end_rehearsal() {
  // An exception has ended the backward: what it left goes now, as long as nothing else can be meant.
  if (engine_.backward_ == BackwardState::kRunning) {
    engine_.adds_to_gradients_ = false;
    engine_.drop_backward();
  }
  engine_.reducer_.end_rehearsal();
  for (std::size_t k = 0; k < units_.size(); ++k) {
    Unit& unit = *engine_.units_[k];
    unit.options.requires_gradient_sync = units_[k].requires_gradient_sync;
    unit.whole.last_backward = units_[k].last_backward;
    for (std::size_t i = 0; i < unit.parameters.size(); ++i) unit.parameters[i].has_gradient = units_[k].has_gradient[i];
  }
  engine_.facts_.is_last_backward = is_last_backward_;
  engine_.facts_.manual_finalization = manual_finalization_;
}

}  // namespace fsdp::engine
