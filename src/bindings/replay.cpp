#include <pybind11/functional.h>
#include <torch/extension.h>

#include <memory>
#include <utility>

#include "bindings/bindings.h"
#include "replay/checker.h"
#include "torch_python/shown_model.h"

namespace py = pybind11;

namespace fsdp::bindings {

using replay::Checker;

void bind_replay(py::module_& module) {
  py::class_<Checker>(module, "MicrobatchChecker")
      .def(py::init([](const torch_python::ShownModel& model, Checker::Buffers buffers) {
             return std::make_unique<Checker>(model.engine(), std::move(buffers));
           }),
           py::arg("model"), py::arg("buffers"))
      // Their callbacks take the GIL.
      .def("check", &Checker::check, py::arg("run"), py::arg("batch"), py::call_guard<py::gil_scoped_release>())
      .def("remember_parameters", &Checker::remember_parameters, py::call_guard<py::gil_scoped_release>());
}

}  // namespace fsdp::bindings
