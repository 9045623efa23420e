#pragma once

#include <torch/extension.h>

#include "comm/communicator.h"

namespace fsdp::torch_python {

/// Memory of tensors of bytes that a function of Python makes. The function goes with the source.
comm::MemorySource memory_source(pybind11::function allocate);

}  // namespace fsdp::torch_python
