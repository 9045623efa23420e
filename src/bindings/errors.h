#pragma once

#include <pybind11/pybind11.h>

#include "fsdp/error.h"

namespace fsdp::bindings {

/// Adds the Python exceptions `Error`, `CommError` and `DamageError`, into which the library's C++ errors are translated.
void bind_errors(pybind11::module_& module);

/// Call it within the handler of `error`. Throws the C++ exception that corresponds to one of the library's Python exceptions; rethrows any
/// other exception unchanged. Needs the GIL.
[[noreturn]] void rethrow_as_error(pybind11::error_already_set& error);

/// Throws the error in a form that reaches Python with its own type through backward(). pybind11's translation does not run within
/// autograd, which would turn every C++ exception into a RuntimeError. Needs no GIL.
[[noreturn]] void throw_into_autograd(const Error& error);

}  // namespace fsdp::bindings
