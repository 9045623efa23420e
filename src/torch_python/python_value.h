#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "checkpoint/python_value.h"

namespace fsdp::torch_python {

/// Convert a Python object to a checkpoint's plain value, and back. Subclasses (Counter, an enum of ints) are saved as the built-in type.
/// Throws Error for anything else, which names the value `name`. Both need the GIL.
ckpt::PythonValue value_from(pybind11::handle object, const std::string& name);
pybind11::object object_of(const ckpt::PythonValue& value);

}  // namespace fsdp::torch_python
