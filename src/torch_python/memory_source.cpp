#include "torch_python/memory_source.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "comm/parts.h"

namespace py = pybind11;

namespace fsdp::torch_python {

comm::MemorySource memory_source(py::function allocate) {
  const auto let_go = [](py::function* function) {
    const py::gil_scoped_acquire gil;
    delete function;
  };
  return [kept = std::shared_ptr<py::function>(new py::function(std::move(allocate)), let_go)](std::int64_t bytes) {
    const py::gil_scoped_acquire gil;
    return comm::memory_of((*kept)(bytes).cast<at::Tensor>());
  };
}

}  // namespace fsdp::torch_python
