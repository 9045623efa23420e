#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "torch_python/shown_unit.h"

namespace fsdp::bindings {

/// Makes the reduced gradients of a unit the gradients of its shards. If `hook` is not None, it is called with all of them first, as one
/// flat tensor; if they do not fit into one, `refused` gets the text of an error, and they are delivered nevertheless. Returns true if some
/// shard has hooks on its gradient, which will not be called.
bool deliver_gradients(torch_python::ShownUnit& shown, const pybind11::object& hook, std::string& refused);

}  // namespace fsdp::bindings
