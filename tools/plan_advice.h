#pragma once

#include <string>

#include "fsdp/plan.h"
#include "plan_model.h"
#include "plan_question.h"

namespace fsdp::tools {

/// Says which options would help: if the plan does not fit, those that make it fit, with none that is not needed, least costly ones first;
/// otherwise those that send less and still fit, a line each.
std::string recommendations(const PlanQuestion& question, const ModelShapes& model, const Plan& plan);

}  // namespace fsdp::tools
