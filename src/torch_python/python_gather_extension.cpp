#include "torch_python/python_gather_extension.h"

#include <utility>

namespace py = pybind11;

namespace fsdp::torch_python {

PythonGatherExtension::PythonGatherExtension(py::function start, py::function finish, py::function free)
    : start_(std::move(start)), finish_(std::move(finish)), free_(std::move(free)) {}

PythonGatherExtension::~PythonGatherExtension() {
  const py::gil_scoped_acquire gil;
  start_ = py::function();
  finish_ = py::function();
  free_ = py::function();
}

std::vector<comm::GatherPart> PythonGatherExtension::start() {
  const py::gil_scoped_acquire gil;
  const auto given = start_().cast<std::vector<std::pair<at::Tensor, at::Tensor>>>();
  std::vector<comm::GatherPart> parts;
  for (const auto& [whole, part] : given) parts.push_back({.full = whole, .shard = part});
  return parts;
}

void PythonGatherExtension::finish() {
  const py::gil_scoped_acquire gil;
  finish_();
}

void PythonGatherExtension::free() {
  const py::gil_scoped_acquire gil;
  free_();
}

}  // namespace fsdp::torch_python
