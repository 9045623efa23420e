#include <torch/extension.h>

#include "base/process.h"
#include "bindings/bindings.h"
#include "fsdp/version.h"

PYBIND11_MODULE(_C, module) {
  fsdp::prepare_process();
  module.doc() = "The C++ engine of libfsdp. Python programs use the package's own names.";
  module.attr("version") = fsdp::version();
  // With the local build: "2.13.0+cpu" and "2.13.0+cu126" are different libraries.
  module.attr("torch_version") = FSDP_PYTHON_TORCH_VERSION;
  fsdp::bindings::bind_mesh(module);
  fsdp::bindings::bind_hooks(module);
  fsdp::bindings::bind_optim(module);
  fsdp::bindings::bind_checkpoint(module);
  fsdp::bindings::bind_export(module);
  fsdp::bindings::bind_transfer(module);
  fsdp::bindings::bind_report(module);
  fsdp::bindings::bind_plan(module);
  fsdp::bindings::bind_replay(module);
  fsdp::bindings::bind_budget(module);
}
