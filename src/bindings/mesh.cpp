// Meshes whose ranks torch.distributed has brought together.

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/bindings.h"
#include "bindings/python_communicator.h"
#include "comm/device_mesh_state.h"
#include "comm/null_communicator.h"
#include "comm/store_mesh.h"

namespace py = pybind11;

namespace fsdp::bindings {
namespace {

DeviceMesh make_mesh(const c10::intrusive_ptr<c10d::Store>& store, std::string prefix, std::int64_t rank, std::int64_t world_size,
                     std::vector<std::string> dims, std::vector<std::vector<std::int64_t>> rows, const at::Device& device, double timeout) {
  return comm::make_store_mesh({.store = store,
                                .prefix = std::move(prefix),
                                .rank = rank,
                                .world_size = world_size,
                                .dims = std::move(dims),
                                .rows = std::move(rows),
                                .device = device,
                                .timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 1000))});
}

/// `make(d, ranks)` gives the collectives along dimension d, over so many neighbours.
DeviceMesh make_python_mesh(std::int64_t rank, const std::vector<std::string>& dims, const std::vector<std::int64_t>& sizes,
                            const std::vector<std::int64_t>& coordinates, const at::Device& device, const py::function& make) {
  auto state = std::make_shared<DeviceMesh::State>();
  state->device = device;
  state->rank = rank;
  state->coordinates = coordinates;
  for (std::size_t d = 0; d < dims.size(); ++d) {
    state->dims.push_back({dims[d], sizes[d]});
    const auto communicator = [make = std::make_shared<py::function>(make), d, position = coordinates[d]](std::int64_t neighbours) {
      const py::gil_scoped_acquire gil;
      return std::make_shared<PythonCommunicator>((*make)(d, neighbours), static_cast<int>(position % neighbours),
                                                  static_cast<int>(neighbours));
    };
    state->communicators.push_back(communicator(sizes[d]));
    state->make_communicator.emplace_back(communicator);
  }
  return DeviceMesh(std::move(state));
}

}  // namespace

void bind_mesh(py::module_& module) {
  py::class_<DeviceMesh>(module, "Mesh", "The ranks that share a unit, arranged in one or two dimensions.")
      .def_property_readonly("sizes", [](const DeviceMesh& mesh) {
        std::vector<std::int64_t> sizes;
        for (const auto& dim : mesh.dims()) sizes.push_back(dim.size);
        return sizes;
      });
  module.def("make_mesh", &make_mesh, py::arg("store"), py::arg("prefix"), py::arg("rank"), py::arg("world_size"), py::arg("dims"),
             py::arg("rows"), py::arg("device"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>(),
             "A mesh with connections of its own between the ranks of each row, which meet by the store.");
  module.def("make_python_mesh", &make_python_mesh, py::arg("rank"), py::arg("dims"), py::arg("sizes"), py::arg("coordinates"),
             py::arg("device"), py::arg("make"), "A mesh over collectives of Python: make(dimension, neighbours).");
}

}  // namespace fsdp::bindings
