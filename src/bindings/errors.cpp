#include "bindings/errors.h"

#include <torch/csrc/Exceptions.h>

#include <exception>

namespace py = pybind11;

namespace fsdp::bindings {
namespace {

// Of the module, which no interpreter unloads.
PyObject* error_type = nullptr;
PyObject* comm_error_type = nullptr;

void set_python_error(const Error& error) {
  PyErr_SetString(dynamic_cast<const CommError*>(&error) != nullptr ? comm_error_type : error_type, error.what());
}

}  // namespace

void bind_errors(py::module_& module) {
  static py::exception<Error> error(module, "Error", PyExc_RuntimeError);
  static py::exception<CommError> comm_error(module, "CommError", error.ptr());
  error.attr("__doc__") = "Bad input or misuse; the message names the parameter, unit or variable, and the way out.";
  comm_error.attr("__doc__") = "A peer failed, left, or does something else: look for the rank that failed first.";
  error_type = error.ptr();
  comm_error_type = comm_error.ptr();
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& failure) {
      set_python_error(failure);
    }
  });
}

void throw_into_autograd(const Error& error) {
  const py::gil_scoped_acquire gil;
  set_python_error(error);
  python_error thrown;
  thrown.persist();
  throw thrown;
}

}  // namespace fsdp::bindings
