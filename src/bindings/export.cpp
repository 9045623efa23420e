// Whole weights out of a model.

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/outside_transforms.h"
#include "bindings/bindings.h"
#include "export/chosen_entries.h"
#include "export/weight_stream.h"
#include "fsdp/error.h"
#include "torch_python/shown_model.h"

namespace py = pybind11;

namespace fsdp::bindings {
namespace {

using torch_python::ShownUnit;
using weights::WeightStream;

using Sizes = std::vector<std::int64_t>;

/// The chunks of a piece: where each begins in the piece and in the tensor, and its sizes.
using GivenChunks = std::vector<std::tuple<Sizes, Sizes, Sizes>>;

std::shared_ptr<weights::Assembly> make_assembly(const std::vector<DeviceMesh>& meshes, std::vector<Sizes> shapes,
                                                 const std::vector<GivenChunks>& chunks) {
  auto assembly = std::make_shared<weights::Assembly>();
  assembly->shapes = std::move(shapes);
  for (const auto& mesh : meshes) {
    for (const auto& dim : mesh.dims()) assembly->rows.push_back(mesh.communicator(dim.name));
  }
  for (const auto& of_rank : chunks) {
    auto& placed = assembly->boxes.emplace_back();
    for (const auto& [in_piece, in_whole, sizes] : of_rank) placed.push_back({.in_piece = in_piece, .in_whole = in_whole, .sizes = sizes});
  }
  return assembly;
}

weights::Entry make_entry(std::vector<std::string> names, Sizes shape, at::Tensor own, const at::Tensor& value, bool as_is,
                          const std::shared_ptr<weights::Assembly>& assembly) {
  return {.names = std::move(names),
          .shape = std::move(shape),
          .own = std::move(own),
          .assembly = assembly,
          .as_is = as_is,
          .wrapper = value.unsafeGetTensorImpl()->version_counter()};
}

FullWeightsOptions make_options(std::int64_t bucket_bytes, std::optional<at::ScalarType> dtype, WeightReceivers ranks,
                                std::vector<WeightAdapter> adapters, std::shared_ptr<WeightSnapshot> since) {
  return {.bucket_bytes = bucket_bytes, .dtype = dtype, .ranks = ranks, .merge_adapters = std::move(adapters), .since = std::move(since)};
}

/// `names`: the receiver's names of the tensors that come, by their own.
std::shared_ptr<WeightStream> make_stream(const std::vector<std::shared_ptr<torch_python::ShownModel>>& models,
                                          std::vector<DeviceMesh> meshes, std::vector<weights::Entry> entries,
                                          const std::map<std::string, std::string>& names, FullWeightsOptions options,
                                          std::string problem) {
  weights::Request request{.engines = {},
                           .meshes = std::move(meshes),
                           .entries = std::move(entries),
                           .options = std::move(options),
                           .problem = std::move(problem)};
  for (const auto& model : models) request.engines.push_back(model->engine());
  if (request.problem.empty()) {
    try {
      std::vector<std::string> own_names;
      for (const auto& [name, renamed] : names) own_names.push_back(name);
      weights::choose(request, own_names, [&](const std::string& name) { return names.at(name); });
    } catch (const Error& error) {
      request.problem = error.what();
      request.entries.clear();
    }
  }
  const py::gil_scoped_release no_gil;
  const OutsideTransforms outside;
  return {new WeightStream(std::move(request)), [](WeightStream* stream) {
            const py::gil_scoped_release no_gil_at_end;  // Its end may wait for other ranks.
            delete stream;
          }};
}

}  // namespace

void bind_export(py::module_& module) {
  py::enum_<WeightReceivers>(module, "WeightReceivers", "Which ranks get unsharded weights.")
      .value("ALL", WeightReceivers::kAll)
      .value("FIRST", WeightReceivers::kFirst)
      .value("ONE_PER_HOST", WeightReceivers::kOnePerHost);
  py::class_<WeightSnapshot, std::shared_ptr<WeightSnapshot>>(module, "WeightSnapshot", "What the receivers of a model's weights have.")
      .def(py::init<std::optional<at::Device>>(), py::arg("device"))
      .def_property_readonly("nbytes", &WeightSnapshot::nbytes);
  py::class_<WeightAdapter>(module, "WeightAdapter", "scale * up @ down, which is added to a weight.")
      .def(py::init<std::string, std::string, std::string, double, bool>(), py::arg("weight"), py::arg("up"), py::arg("down"),
           py::arg("scale"), py::arg("transposed"))
      .def_readonly("up", &WeightAdapter::up)
      .def_readonly("down", &WeightAdapter::down);
  py::class_<FullWeightsOptions>(module, "FullWeightsOptions", "What full_weights gives, and to whom.")
      .def(py::init(&make_options), py::kw_only(), py::arg("bucket_bytes"), py::arg("dtype"), py::arg("ranks"), py::arg("adapters"),
           py::arg("since"));
  py::class_<weights::Assembly, std::shared_ptr<weights::Assembly>>(module, "WeightAssembly", "How a tensor is put together from pieces.")
      .def(py::init(&make_assembly), py::arg("meshes"), py::arg("shapes"), py::arg("chunks"));
  py::class_<weights::Entry>(module, "WeightEntry", "A tensor of a model's state, and what this rank has of it.")
      .def(py::init(&make_entry), py::kw_only(), py::arg("names"), py::arg("shape"), py::arg("own"), py::arg("value"), py::arg("as_is"),
           py::arg("assembly"))
      .def(
          "set_unit",
          [](weights::Entry& entry, ShownUnit& unit, std::size_t parameter, std::int64_t cut) {
            entry.unit = &unit.unit();
            entry.parameter = parameter;
            entry.cut = cut;
          },
          py::arg("unit"), py::arg("parameter"), py::arg("cut"));
  py::class_<WeightChange>(module, "WeightChange", "New values for some elements of a tensor.")
      .def_readonly("name", &WeightChange::name)
      .def_readonly("shape", &WeightChange::shape)
      .def_readonly("positions", &WeightChange::positions)
      .def_readonly("values", &WeightChange::values);
  py::class_<WeightBucket>(module, "WeightBucket", "Whole tensors, changes of others, and the buffer of all these.")
      .def_readonly("weights", &WeightBucket::weights)
      .def_readonly("changes", &WeightBucket::changes)
      .def_readonly("flat", &WeightBucket::flat);
  constexpr auto kNoGil = py::call_guard<py::gil_scoped_release, OutsideTransforms>();
  py::class_<WeightStream, std::shared_ptr<WeightStream>>(module, "WeightStream", "Whole tensors of a model, bucket by bucket.")
      .def(py::init(&make_stream), py::arg("models"), py::arg("meshes"), py::arg("entries"), py::arg("names"), py::arg("options"),
           py::arg("problem"))
      .def("next", &WeightStream::next, kNoGil)
      .def("close", &WeightStream::close, kNoGil)
      .def_property_readonly("buckets", &WeightStream::buckets)
      .def_property_readonly("changed_fraction", &WeightStream::changed_fraction);
}

}  // namespace fsdp::bindings
