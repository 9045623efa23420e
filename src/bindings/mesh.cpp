// Meshes of ranks that torch.distributed has connected.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/bindings.h"
#include "comm/launch/endings.h"
#include "comm/mesh/device_mesh_state.h"
#include "comm/mesh/ranks.h"
#include "comm/mesh/store_mesh.h"
#include "torch_python/fake_communicator.h"
#include "torch_python/python_communicator.h"
#include "torch_python/visible_communicator.h"

namespace py = pybind11;

namespace fsdp::bindings {

using torch_python::collectives_are_visible;
using torch_python::FakeCommunicator;
using torch_python::PythonCommunicator;
using torch_python::set_collectives_replaced;
using torch_python::VisibleCommunicator;

namespace {

/// Returns a function that can be copied and released without the GIL.
std::shared_ptr<py::function> shared(py::function function) {
  return {new py::function(std::move(function)), [](py::function* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

/// Makes the Python collectives along one dimension, over a number of neighbours.
class PythonCollectives {
 public:
  explicit PythonCollectives(py::function make) : make_(shared(std::move(make))) {}

  std::shared_ptr<PythonCommunicator> operator()(std::size_t dimension, std::int64_t position, std::int64_t neighbours) const {
    const py::gil_scoped_acquire gil;
    return std::make_shared<PythonCommunicator>((*make_)(dimension, neighbours), static_cast<int>(position % neighbours),
                                                static_cast<int>(neighbours));
  }

 private:
  std::shared_ptr<py::function> make_;
};

/// Asks Python for the backend of a dimension (StoreMesh::backend_of).
class PythonBackends {
 public:
  explicit PythonBackends(py::function backend_of) : backend_of_(shared(std::move(backend_of))) {}

  c10::intrusive_ptr<c10d::Backend> operator()(std::size_t dimension, std::int64_t neighbours) const {
    const py::gil_scoped_acquire gil;
    return (*backend_of_)(dimension, neighbours).cast<c10::intrusive_ptr<c10d::Backend>>();
  }

 private:
  std::shared_ptr<py::function> backend_of_;
};

/// A mesh with connections of its own between the ranks of each row, or with the given backends.
DeviceMesh make_mesh(const c10::intrusive_ptr<c10d::Store>& store, std::string prefix, std::int64_t rank, std::int64_t world_size,
                     std::vector<std::string> dims, std::vector<std::vector<std::int64_t>> rows, const at::Device& device, double timeout,
                     py::function make, std::optional<py::function> backend_of) {
  const PythonCollectives collectives(std::move(make));
  std::optional<PythonBackends> backends;
  if (backend_of) backends.emplace(*std::move(backend_of));
  const py::gil_scoped_release no_gil;
  const auto own = comm::make_store_mesh({.store = store,
                                          .prefix = std::move(prefix),
                                          .rank = rank,
                                          .world_size = world_size,
                                          .dims = std::move(dims),
                                          .rows = std::move(rows),
                                          .device = device,
                                          .options = {.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 1000))},
                                          .backend_of = backends ? decltype(comm::StoreMesh::backend_of)(*backends) : nullptr});
  auto state = std::make_shared<DeviceMesh::State>();
  state->device = device;
  state->rank = rank;
  state->world_size = world_size;
  state->dims = own.dims();
  for (std::size_t d = 0; d < state->dims.size(); ++d) {
    const auto name = state->dims[d].name;
    const auto size = state->dims[d].size;
    const auto position = own.coordinate(name);
    state->coordinates.push_back(position);
    auto make = [own, name, collectives, d, position](std::int64_t neighbours) {
      auto communicator = own.new_communicator(name, neighbours);
      return std::make_shared<VisibleCommunicator>(std::move(communicator), collectives(d, position, neighbours));
    };
    auto first = std::make_shared<VisibleCommunicator>(own.communicator(name), collectives(d, position, size));
    state->rows.push_back(std::make_shared<MeshRow>(MeshRow{.communicator = std::move(first), .make = std::move(make)}));
  }
  state->joined = own.state()->joined;
  return DeviceMesh(std::move(state));
}

/// Returns a mesh whose communicators come from `make(dimension, position, neighbours)`. This process knows only its own place in it.
template <typename Make>
DeviceMesh mesh_of(std::int64_t rank, const std::vector<std::string>& dims, const std::vector<std::int64_t>& sizes,
                   const std::vector<std::int64_t>& coordinates, const at::Device& device, const Make& make) {
  auto state = std::make_shared<DeviceMesh::State>();
  state->device = device;
  state->rank = rank;
  state->coordinates = coordinates;
  for (std::size_t d = 0; d < dims.size(); ++d) {
    state->dims.push_back({dims[d], sizes[d]});
    const auto make_in_row = [make, d, position = coordinates[d]](std::int64_t neighbours) { return make(d, position, neighbours); };
    state->rows.push_back(std::make_shared<MeshRow>(MeshRow{.communicator = make_in_row(sizes[d]), .make = make_in_row}));
  }
  return DeviceMesh(std::move(state));
}

DeviceMesh make_python_mesh(std::int64_t rank, const std::vector<std::string>& dims, const std::vector<std::int64_t>& sizes,
                            const std::vector<std::int64_t>& coordinates, const at::Device& device, py::function make) {
  return mesh_of(rank, dims, sizes, coordinates, device, PythonCollectives(std::move(make)));
}

DeviceMesh make_fake_mesh(std::int64_t rank, const std::vector<std::string>& dims, const std::vector<std::int64_t>& sizes,
                          const std::vector<std::int64_t>& coordinates, const at::Device& device, py::function make) {
  const auto visible = [collectives = PythonCollectives(std::move(make))](std::size_t d, std::int64_t position, std::int64_t neighbours) {
    auto own = std::make_shared<FakeCommunicator>(static_cast<int>(position % neighbours), static_cast<int>(neighbours));
    return std::make_shared<VisibleCommunicator>(std::move(own), collectives(d, position, neighbours));
  };
  return mesh_of(rank, dims, sizes, coordinates, device, visible);
}

}  // namespace

void bind_mesh(py::module_& module) {
  py::class_<DeviceMesh>(module, "DeviceMesh", "The ranks that share a unit, arranged in one or two dimensions.")
      .def_property_readonly("sizes",
                             [](const DeviceMesh& mesh) {
                               std::vector<std::int64_t> sizes;
                               for (const auto& dim : mesh.dims()) sizes.push_back(dim.size);
                               return sizes;
                             })
      .def(
          "compare",
          [](const DeviceMesh& mesh, const std::string& text, bool of_values) {
            const comm::Label of_options{.operation = "comparison of options", .unit = text};
            comm::Ranks(mesh).compare(text,
                                      of_values ? comm::Label{.operation = "check_initial_values", .unit = "(first values)"} : of_options);
          },
          py::arg("text"), py::kw_only(), py::arg("of_values") = false, py::call_guard<py::gil_scoped_release>(),
          "Raises Error on all ranks if they have other texts. Collective.");
  module.def("make_mesh", &make_mesh, py::arg("store"), py::arg("prefix"), py::arg("rank"), py::arg("world_size"), py::arg("dims"),
             py::arg("rows"), py::arg("device"), py::arg("timeout"), py::arg("make"), py::arg("backend_of"),
             "A mesh with connections of its own between the ranks of each row, which meet by the store. make(dimension, neighbours) "
             "gives the collectives for when they are to be visible. backend_of(dimension, neighbours), if it is not None, gives the "
             "backends that move the tensors: of the row if neighbours is 0, else of a new group.");
  module.def("collectives_are_visible", &collectives_are_visible, "Collectives go through torch.distributed, where others see them.");
  module.def(
      "tell_ending",
      [](const std::string& error) {
        const auto failed = error.starts_with("KeyboardInterrupt") ? comm::Ending::kStopped : comm::Ending::kFailed;
        comm::tell_ending(error.empty() ? comm::Ending::kReturned : failed, error);
      },
      py::arg("error"), py::call_guard<py::gil_scoped_release>(),
      "This rank's script has come to its end, or has failed with this error: for the errors of ranks that wait for it.");
  module.def("set_collectives_replaced", &set_collectives_replaced, "Functions of torch.distributed have been replaced by a program.");
  module.def("make_python_mesh", &make_python_mesh, py::arg("rank"), py::arg("dims"), py::arg("sizes"), py::arg("coordinates"),
             py::arg("device"), py::arg("make"), "A mesh over collectives of Python: make(dimension, neighbours).");
  module.def("make_fake_mesh", &make_fake_mesh, py::arg("rank"), py::arg("dims"), py::arg("sizes"), py::arg("coordinates"),
             py::arg("device"), py::arg("make"),
             "As make_python_mesh, of peers that are not there: collectives of Python only where they are visible.");
}

}  // namespace fsdp::bindings
