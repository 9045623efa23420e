#pragma once

#include <torch/extension.h>

#include <vector>

#include "engine/gather_extension.h"

namespace fsdp::torch_python {

/// A gather extension whose three calls are functions of Python: start() gives pairs of tensors (whole, this rank's part). Takes the GIL
/// for them. Exceptions that they raise reach the caller.
class PythonGatherExtension final : public engine::GatherExtension {
 public:
  PythonGatherExtension(pybind11::function start, pybind11::function finish, pybind11::function free);
  ~PythonGatherExtension() override;

  std::vector<comm::GatherPart> start() override;
  void finish() override;
  void free() override;

 private:
  pybind11::function start_;
  pybind11::function finish_;
  pybind11::function free_;
};

}  // namespace fsdp::torch_python
