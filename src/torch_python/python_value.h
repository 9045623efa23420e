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

/// Functions of the bindings may return plain values, also within containers.
template <>
struct pybind11::detail::type_caster<fsdp::ckpt::PythonValue> {
  PYBIND11_TYPE_CASTER(fsdp::ckpt::PythonValue, const_name("object"));
  static handle cast(const fsdp::ckpt::PythonValue& value, return_value_policy /*policy*/, handle /*parent*/) {
    return fsdp::torch_python::object_of(value).release();
  }
};
