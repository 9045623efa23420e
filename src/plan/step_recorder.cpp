#include "plan/step_recorder.h"

#include <utility>

namespace fsdp::planning {

StepRecorder::StepRecorder(std::span<const std::unique_ptr<engine::Unit>> units,
                           const std::map<const comm::Communicator*, std::size_t>& link_of)
    : link_of_(link_of) {
  for (const auto& unit : units) unit_of_.emplace(unit->name, unit->place.index);
}

std::size_t StepRecorder::posted(const comm::NullCommunicator& row, const comm::Sent& sent, const comm::Label& label) {
  const auto unit = unit_of_.find(label.unit);
  const PlannedAction action{.what = PlannedAction::What::kPost,
                             .in_backward = in_backward_,
                             .unit = unit == unit_of_.end() ? 0 : unit->second,
                             .number = posts_.size(),
                             .link = link_of_.at(&row),
                             .queue = queue_of_.emplace(&row, queue_of_.size()).first->second,
                             .bytes = sent.wire + sent.shared_memory};
  actions_.push_back(action);
  posts_.push_back(action);
  return action.number;
}

void StepRecorder::waited(std::size_t number) {
  auto action = posts_[number];
  action.what = PlannedAction::What::kWait;
  action.in_backward = in_backward_;
  actions_.push_back(action);
}

void StepRecorder::compute(std::size_t unit, engine::Pass pass) {
  in_backward_ = pass == engine::Pass::kBackward;
  actions_.push_back({.what = PlannedAction::What::kCompute, .in_backward = in_backward_, .unit = unit});
}

void StepRecorder::update() { actions_.push_back({.what = PlannedAction::What::kUpdate, .in_backward = true}); }

std::vector<PlannedAction> StepRecorder::take() {
  std::map<std::pair<std::size_t, bool>, double> places;
  for (const auto& action : actions_) {
    if (action.what == PlannedAction::What::kCompute) ++places[{action.unit, action.in_backward}];
  }
  for (auto& action : actions_) {
    if (action.what == PlannedAction::What::kCompute) action.share = 1 / places[{action.unit, action.in_backward}];
  }
  return std::exchange(actions_, {});
}

}  // namespace fsdp::planning
