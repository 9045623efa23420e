#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "torch_python/shown_unit.h"

namespace fsdp::bindings {

/// Makes the reduced gradients of units the gradients of their shards, and then runs the shards' hooks on accumulated gradients: a shard
/// that several units have gets the gradients of all of them before.
///
/// `hooks`: by the positions of units, functions that are called first with all gradients of the unit, as one flat tensor.
///
/// Returns the positions of units of which some shard has hooks on its gradient, which will not be called. Throws Error at the end if the
/// gradients of a unit do not fit into one tensor for its hook; they are delivered nevertheless.
std::vector<std::size_t> deliver_gradients(const std::vector<std::shared_ptr<torch_python::ShownUnit>>& units,
                                           const std::map<std::size_t, pybind11::object>& hooks);

}  // namespace fsdp::bindings
