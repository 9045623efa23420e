#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives.h"
#include "device.h"

// What tests in Python need of the device: sim_device.py makes torch.sim of it.
namespace {

namespace py = pybind11;

std::map<std::string, std::int64_t> memory(int device) {
  const auto stats = sim::stats(device);
  return {{"allocations", stats.allocations}, {"allocated", stats.allocated}, {"peak", stats.peak}, {"reserved", stats.reserved}};
}

}  // namespace

PYBIND11_MODULE(_sim_device, m) {
  py::module_::import("torch.distributed");  // It knows c10d's classes.
  // FSDP2's gradients are freed while their stream is behind the optimizer's; it waits before it gets the memory again.
  sim::set_options({.judge_at_reuse = true});
  m.attr("DEVICES") = sim::kDevices;
  m.def("kernels", [](int device) { return sim::stats(device).kernels; });
  m.def("host_waits", [](int device) { return sim::stats(device).host_waits; });
  m.def("memory", &memory);
  m.def("reset_stats", &sim::reset_stats);
  m.def("take_reports", &sim::take_reports);
  m.def("now", &sim::now);
  m.def(
      "set_cost",
      [](std::uint64_t launch, std::uint64_t kernel, std::uint64_t collective, double kernel_byte, double collective_byte) {
        sim::set_cost({launch, kernel, collective, kernel_byte, collective_byte});
      },
      py::kw_only(), py::arg("launch") = 0, py::arg("kernel") = 0, py::arg("collective") = 0, py::arg("kernel_byte") = 0,
      py::arg("collective_byte") = 0);
  m.def("make_collectives", [](const c10::intrusive_ptr<c10d::Backend>& messages) { return sim::make_collectives(messages); });
}
