#pragma once

#include <string>

namespace fsdp::tools {

/// Prints what two plans have, which --json has written: their bytes at the peak, what they send, and their times if both have them.
/// Returns the exit code. Throws Error if one is no plan.
int compare_plans(const std::string& first, const std::string& second);

}  // namespace fsdp::tools
