#pragma once

#include <pybind11/pybind11.h>

#include "fsdp/error.h"

namespace fsdp::bindings {

/// Adds `Error`, `CommError` and `DamageError` to the module, as which the library's errors arrive in Python.
void bind_errors(pybind11::module_& module);

/// Within the handler of `error`: throws one of the library's as what it was in C++, others as they are. Needs the GIL.
[[noreturn]] void rethrow_as_error(pybind11::error_already_set& error);

/// Throws the error as autograd keeps it on its way through backward(): pybind11's translation does not run there, and every exception of
/// C++ becomes a RuntimeError. Needs no GIL.
[[noreturn]] void throw_into_autograd(const Error& error);

}  // namespace fsdp::bindings
