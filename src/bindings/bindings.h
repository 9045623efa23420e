#pragma once

#include <pybind11/pybind11.h>

/// The functions that add classes and functions to `libfsdp._C`: each is a `void bind_xxx(pybind11::module_&)` in a file of its own.
/// `module.cpp` calls all of them when Python loads the extension, with the GIL held. At that time there is no rank, mesh or process group
/// yet.
namespace fsdp::bindings {

void bind_mesh(pybind11::module_& module);
void bind_hooks(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_checkpoint(pybind11::module_& module);
void bind_export(pybind11::module_& module);
void bind_transfer(pybind11::module_& module);
void bind_report(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_replay(pybind11::module_& module);
void bind_budget(pybind11::module_& module);

}  // namespace fsdp::bindings
