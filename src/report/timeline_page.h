#pragma once

#include <optional>
#include <string>

#include "report/plan_comparison.h"
#include "report/timeline.h"

namespace fsdp::report {

/// The timeline as one page of HTML, which loads nothing: its program and its style are timeline_*.js and .css of this folder, its data are
/// JSON in a script element. It shows `title`. With `plan`, it shows planned values beside the measured ones.
std::string timeline_page(const Timeline& timeline, const std::string& title, const std::optional<PlanComparison>& plan = {});

}  // namespace fsdp::report
