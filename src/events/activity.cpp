#include "events/activity.h"

#include "base/text.h"

namespace fsdp::events {

std::string activity_text(Activity::Kind kind, std::string_view unit, std::string_view next) {
  const auto moves = next.empty() || next == unit ? std::string() : std::string(", before '").append(next).append("'");
  switch (kind) {
    case Activity::Kind::kForward:
      return "in forward" + of_unit(unit) + moves;
    case Activity::Kind::kBackward:
      return "in backward" + of_unit(unit) + moves;
    case Activity::Kind::kBetweenSteps:
      return "between steps";
    case Activity::Kind::kWaiting:
      return "waiting for " + (unit.empty() ? std::string("other ranks") : std::string("a collective of '").append(unit).append("'"));
    case Activity::Kind::kUnknown:
      break;
  }
  return "in code that records no events";
}

std::string position_text(Activity::Kind kind, std::string_view unit) {
  if (kind == Activity::Kind::kUnknown) return "before its first forward";
  const auto text = activity_text(kind, unit, {});
  return kind == Activity::Kind::kBetweenSteps ? text + " (the optimizer, loading data, saving)" : text;
}

std::string call_text(std::string_view operation, std::string_view unit) {
  return (operation.empty() ? "a collective" : std::string("the ").append(operation)) + of_unit(unit);
}

}  // namespace fsdp::events
