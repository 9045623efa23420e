#pragma once

#include <pybind11/pybind11.h>

/// What the parts of `libfsdp._C` add to it: functions `void bind_xxx(pybind11::module_&)`, each in a file of its own. `module.cpp` calls
/// all of them when Python loads the extension, with the GIL held; there is no rank, no mesh and no process group yet.
namespace fsdp::bindings {

void bind_mesh(pybind11::module_& module);
void bind_hooks(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_checkpoint(pybind11::module_& module);

}  // namespace fsdp::bindings
