#include "events/whereabouts.h"

namespace fsdp::events {

bool Whereabouts::take(const Event& event) noexcept {
  switch (event.kind) {
    case EventKind::kStepBegan:
      pass_ = Pass::kForward;
      unit_ = 0;
      break;
    case EventKind::kEntered:
      pass_ = event.in_backward ? Pass::kBackward : Pass::kForward;
      unit_ = event.unit;
      break;
    case EventKind::kBackwardBegan:
      pass_ = Pass::kBackward;
      unit_ = 0;
      break;
    case EventKind::kBackwardEnded:
      pass_ = event.number != 0 ? Pass::kBetweenSteps : Pass::kForward;
      unit_ = 0;
      break;
    default:
      return false;
  }
  since_ = event.time;
  return true;
}

std::string Whereabouts::describe(std::string_view unit) const {
  switch (pass_) {
    case Pass::kNone:
      return "before its first forward";
    case Pass::kForward:
      return "in forward" + of_unit_text(unit);
    case Pass::kBackward:
      return "in backward" + of_unit_text(unit);
    case Pass::kBetweenSteps:
      break;
  }
  return "between steps (the optimizer, loading data, saving)";
}

std::string of_unit_text(std::string_view unit) {
  if (unit == "(root)") return " of the root unit";
  if (unit.empty() || unit.front() == '(') return "";
  return std::string(" of '").append(unit).append("'");
}

}  // namespace fsdp::events
