#pragma once

#include <string>

#include "fsdp/plan.h"
#include "fsdp/simulate.h"
#include "plan_model.h"
#include "plan_question.h"

namespace fsdp::tools {

/// The time of a step, and its range if all rates are off.
struct PlannedTime {
  Simulation middle;             ///< With the rates as they were given.
  double from_ms = 0;            ///< With better rates.
  double to_ms = 0;              ///< With worse ones.
  double tokens_per_second = 0;  ///< Of a rank.
};

/// Simulates steps with the rates of the question.
PlannedTime time_of(const PlanQuestion& question, const Plan& plan, const ModelShapes& model);
/// One line about it, for people.
std::string text_of(const PlannedTime& time);

}  // namespace fsdp::tools
