#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/null_communicator.h"
#include "engine/unit.h"
#include "fsdp/plan.h"

namespace fsdp::planning {

/// Records the actions of a rank in a step: see PlannedAction.
class StepRecorder final : public comm::CollectiveListener {
 public:
  /// `link_of`: of the units' communicators, in Plan::links.
  StepRecorder(std::span<const std::unique_ptr<engine::Unit>> units, const std::map<const comm::Communicator*, std::size_t>& link_of);

  std::size_t posted(const comm::NullCommunicator& row, const comm::Sent& sent, const comm::Label& label) override;
  void waited(std::size_t number) override;
  /// The computation of a unit continues.
  void compute(std::size_t unit, engine::Pass pass);
  void update();

  /// Returns all of it. A unit whose computation is in several places has an equal share of it in each.
  std::vector<PlannedAction> take();

 private:
  const std::map<const comm::Communicator*, std::size_t>& link_of_;
  std::map<const comm::Communicator*, std::size_t> queue_of_;
  std::map<std::string_view, std::size_t> unit_of_;
  std::vector<PlannedAction> posts_;  // by number
  std::vector<PlannedAction> actions_;
  bool in_backward_ = false;
};

}  // namespace fsdp::planning
