#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "export/weight_stream.h"

namespace fsdp::weights {

/// Selects entries of a request, which has those of all tensors: keeps the entries to send, under the receiver's names, with the products
/// of Request::options.merge_adapters, and moves the adapters' matrices to the factors. `names`: the tensors to send; by default all except
/// these matrices. `rename`: returns the receiver's name; null: names are not changed. Needs no other ranks. Throws Error for names that
/// are not in the request, two tensors with one name, and adapters that do not fit.
void choose(Request& request, const std::optional<std::vector<std::string>>& names,
            const std::function<std::string(const std::string& name)>& rename);

}  // namespace fsdp::weights
