#include "bindings/errors.h"

#include <torch/csrc/Exceptions.h>

#include <exception>
#include <string>

#include "checkpoint/commit.h"

namespace py = pybind11;

namespace fsdp::bindings {
namespace {

// The exception classes, which live as long as the module, that is, until the process ends.
PyObject* error_type = nullptr;
PyObject* comm_error_type = nullptr;
PyObject* damage_error_type = nullptr;

PyObject* type_of(const Error& error) {
  if (dynamic_cast<const CommError*>(&error) != nullptr) return comm_error_type;
  return dynamic_cast<const ckpt::DamageError*>(&error) != nullptr ? damage_error_type : error_type;
}

void set_python_error(const Error& error) { PyErr_SetString(type_of(error), error.what()); }

}  // namespace

void bind_errors(py::module_& module) {
  static py::exception<Error> error(module, "Error", PyExc_RuntimeError);
  static py::exception<CommError> comm_error(module, "CommError", error.ptr());
  static py::exception<ckpt::DamageError> damage_error(module, "DamageError", error.ptr());
  error.attr("__doc__") = "Bad input or misuse; the message names the parameter, unit or variable, and the way out.";
  comm_error.attr("__doc__") = "A peer failed, left, or does something else: look for the rank that failed first.";
  damage_error.attr("__doc__") = "A checkpoint's bytes are not those that were written.";
  error_type = error.ptr();
  comm_error_type = comm_error.ptr();
  damage_error_type = damage_error.ptr();
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& failure) {
      set_python_error(failure);
    }
  });
}

void rethrow_as_error(py::error_already_set& error) {
  if (!error.matches(error_type)) throw;
  const auto text = py::str(error.value()).cast<std::string>();
  if (error.matches(comm_error_type)) throw CommError(text);
  if (error.matches(damage_error_type)) throw ckpt::DamageError(text);
  throw Error(text);
}

void throw_into_autograd(const Error& error) {
  const py::gil_scoped_acquire gil;
  set_python_error(error);
  python_error thrown;
  thrown.persist();
  throw thrown;
}

}  // namespace fsdp::bindings
