#include "torch_python/memory_source.h"

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "comm/parts.h"
#include "torch_python/freed_with_gil.h"

namespace py = pybind11;

namespace fsdp::torch_python {

comm::MemorySource memory_source(py::function allocate) {
  return [held = freed_with_gil<py::function>(std::move(allocate))](std::int64_t bytes) {
    const py::gil_scoped_acquire gil;
    return comm::memory_of((*held)(bytes).cast<at::Tensor>());
  };
}

}  // namespace fsdp::torch_python
