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

/// Meshes along whose dimensions a tensor is cut, and by rank the shape of its piece, and the boxes of that: where each begins in the piece
/// and in the tensor, and its sizes.
using GivenAssembly = std::tuple<std::vector<DeviceMesh>, std::vector<Sizes>, std::vector<std::vector<std::tuple<Sizes, Sizes, Sizes>>>>;

/// The names of a tensor, its shape, what this rank has of it, the unit over whose ranks it is cut (or None), its index there, the
/// dimension that is cut, how the whole is put together if a unit has pieces only (or None), whether it is never converted, and the tensor
/// as the state dict has it.
using GivenEntry = std::tuple<std::vector<std::string>, Sizes, at::Tensor, std::shared_ptr<ShownUnit>, std::size_t, std::int64_t,
                              std::optional<GivenAssembly>, bool, at::Tensor>;

/// A WeightAdapter: the names of the weight, of B and of A, the scale, and whether the weight is the transpose.
using GivenAdapter = std::tuple<std::string, std::string, std::string, double, bool>;

/// The tensors, the adapters that are added to some of them, and the receiver's names of those that come, by their own.
using GivenState = std::tuple<std::vector<GivenEntry>, std::vector<GivenAdapter>, std::map<std::string, std::string>>;

/// The whole tensors, what has changed in others (name, shape, positions, values), and the buffer of all these.
using GivenBucket =
    std::tuple<std::vector<std::pair<std::string, at::Tensor>>,
               std::vector<std::tuple<std::string, std::vector<std::int64_t>, at::Tensor, at::Tensor>>, std::optional<at::Tensor>>;

std::shared_ptr<const weights::Assembly> assembly_of(const std::optional<GivenAssembly>& given) {
  if (!given) return nullptr;
  const auto& [meshes, shapes, boxes] = *given;
  weights::Assembly assembly{.rows = {}, .shapes = shapes, .boxes = {}};
  for (const auto& mesh : meshes) {
    for (const auto& dim : mesh.dims()) assembly.rows.push_back(mesh.communicator(dim.name));
  }
  for (const auto& of_rank : boxes) {
    auto& placed = assembly.boxes.emplace_back();
    for (const auto& [in_piece, in_whole, sizes] : of_rank) placed.push_back({.in_piece = in_piece, .in_whole = in_whole, .sizes = sizes});
  }
  return std::make_shared<const weights::Assembly>(std::move(assembly));
}

std::vector<weights::Entry> entries_of(const std::vector<GivenEntry>& given) {
  std::vector<weights::Entry> entries;
  for (const auto& [names, shape, own, unit, parameter, cut, assembly, as_is, value] : given) {
    entries.push_back({.names = names,
                       .shape = shape,
                       .own = own,
                       .unit = unit == nullptr ? nullptr : &unit->unit(),
                       .parameter = parameter,
                       .cut = cut,
                       .assembly = assembly_of(assembly),
                       .as_is = as_is,
                       .wrapper = value.unsafeGetTensorImpl()->version_counter()});
  }
  return entries;
}

std::shared_ptr<WeightStream> make_stream(const std::vector<std::shared_ptr<torch_python::ShownModel>>& models, const GivenState& state,
                                          std::int64_t bucket_bytes, const py::object& dtype, WeightReceivers ranks,
                                          std::shared_ptr<WeightSnapshot> since, std::string problem, std::vector<DeviceMesh> meshes) {
  weights::Request request;
  for (const auto& model : models) request.engines.push_back(model->engine());
  request.meshes = std::move(meshes);
  const auto& [entries, adapters, come] = state;
  request.entries = entries_of(entries);
  for (const auto& [weight, up, down, scale, transposed] : adapters) {
    request.options.merge_adapters.push_back({.weight = weight, .up = up, .down = down, .scale = scale, .transposed = transposed});
  }
  request.options.bucket_bytes = bucket_bytes;
  if (!dtype.is_none()) request.options.dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  request.options.ranks = ranks;
  request.options.since = std::move(since);
  request.problem = std::move(problem);
  if (request.problem.empty()) {
    try {
      std::vector<std::string> names;
      for (const auto& [name, renamed] : come) names.push_back(name);
      weights::choose(request, names, [&come = come](const std::string& name) { return come.at(name); });
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
  py::enum_<WeightReceivers>(module, "WeightReceivers", "Which ranks get whole weights.")
      .value("ALL", WeightReceivers::kAll)
      .value("FIRST", WeightReceivers::kFirst)
      .value("ONE_PER_HOST", WeightReceivers::kOnePerHost);
  py::class_<WeightSnapshot, std::shared_ptr<WeightSnapshot>>(module, "WeightSnapshot", "What the receivers of a model's weights have.")
      .def(py::init<std::optional<at::Device>>(), py::arg("device"))
      .def_property_readonly("nbytes", &WeightSnapshot::nbytes);
  constexpr auto kNoGil = py::call_guard<py::gil_scoped_release, OutsideTransforms>();
  py::class_<WeightStream, std::shared_ptr<WeightStream>>(module, "WeightStream", "Whole tensors of a model, bucket by bucket.")
      .def(py::init(&make_stream), py::arg("models"), py::arg("state"), py::kw_only(), py::arg("bucket_bytes"), py::arg("dtype"),
           py::arg("ranks"), py::arg("since"), py::arg("problem"), py::arg("meshes"))
      .def("next",
           [](WeightStream& stream) -> std::optional<GivenBucket> {
             std::optional<WeightBucket> bucket;
             {
               const py::gil_scoped_release no_gil;
               const OutsideTransforms outside;
               bucket = stream.next();
             }
             if (!bucket) return std::nullopt;
             GivenBucket given(std::move(bucket->weights), {}, bucket->flat.defined() ? std::optional(bucket->flat) : std::nullopt);
             for (auto& [name, shape, positions, values] : bucket->changes) std::get<1>(given).emplace_back(name, shape, positions, values);
             return given;
           })
      .def("close", &WeightStream::close, kNoGil)
      .def_property_readonly("buckets", &WeightStream::buckets)
      .def_property_readonly("changed_fraction", &WeightStream::changed_fraction);
}

}  // namespace fsdp::bindings
