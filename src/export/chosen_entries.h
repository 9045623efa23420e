#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "export/weight_stream.h"

namespace fsdp::weights {

/// Chooses among the entries of a request, which has those of all tensors: keeps those that come, under the receiver's names, with what
/// Request::options.merge_adapters adds to them, and moves the adapters' matrices to the factors. `names`: what comes; by default all, but
/// for these matrices. `rename`: returns the receiver's name; null: names stay. Asks nothing of other ranks. Throws Error for names that do
/// not come, two that would come under one name, and adapters that do not fit.
void choose(Request& request, const std::optional<std::vector<std::string>>& names,
            const std::function<std::string(const std::string& name)>& rename);

}  // namespace fsdp::weights
