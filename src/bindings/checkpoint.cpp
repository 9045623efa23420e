// Checkpoints. The library handles files, checksums and commits; Python collects the values of the model and the optimizer, with their
// names.

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "checkpoint/boxes.h"
#include "checkpoint/checked_files.h"
#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "fsdp/save_load.h"
#include "state/phases.h"
#include "state/ranks.h"
#include "state/scalar_type.h"
#include "state/snapshot.h"
#include "state/source.h"
#include "state/take_newest.h"
#include "state/texts.h"
#include "torch_python/python_value.h"

namespace py = pybind11;

namespace fsdp::bindings {

using torch_python::object_of;
using torch_python::value_from;

namespace {

using Sizes = std::vector<std::int64_t>;
using state::CheckpointRanks;
using state::Snapshot;

const auto kWithoutGil = py::call_guard<py::gil_scoped_release>();

std::string key_of(const ckpt::DcpPath& path) {
  std::string key;
  for (const auto& part : path) {
    const auto* name = std::get_if<std::string>(&part);
    key += (key.empty() ? "" : ".") + (name != nullptr ? *name : std::to_string(std::get<std::int64_t>(part)));
  }
  return key;
}

/// `values` is this rank's own part, the box at `offsets`.
void add_tensor(Snapshot& snapshot, ckpt::DcpPath path, Sizes shape, Sizes offsets, const at::Tensor& values) {
  const auto key = key_of(path);
  const auto plain = values.detach().resolve_conj().resolve_neg().contiguous();
  snapshot.tensors.push_back(
      {.key = key, .path = std::move(path), .dtype = state::dtype_of(values.scalar_type(), key), .shape = std::move(shape), .chunks = {}});
  auto bytes = plain.numel() == 0 ? at::empty({0}, at::kByte) : plain.view({-1}).view(at::kByte);
  snapshot.tensors.back().chunks.push_back({.box = {std::move(offsets), plain.sizes().vec()}, .bytes = std::move(bytes)});
}

void add_value(Snapshot& snapshot, ckpt::DcpPath path, const py::object& value) {
  auto key = key_of(path);
  auto converted = value_from(value, key);
  snapshot.objects.push_back({std::move(key), std::move(path), std::move(converted)});
}

/// Calls a function of Python, which outlives what is returned.
OnPhase on_phase_of(const py::object& function) {
  if (function.is_none()) return {};
  return [held = &function](const PhaseReport& report) {
    static constexpr std::array<const char*, 7> kNames = {"collect", "write", "commit", "prune", "open", "check", "assign"};
    const py::gil_scoped_acquire gil;
    try {
      (*held)(kNames.at(static_cast<std::size_t>(report.phase)), report.bytes, report.seconds);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("on_phase");
    }
  };
}

void write(const std::string& path, const Snapshot& snapshot, const CheckpointRanks& ranks, int keep_last, std::int64_t keep_every,
           int keep_best, const py::object& on_phase) {
  const SaveOptions options = {.keep_last = keep_last, .keep_every = keep_every, .keep_best = keep_best};
  state::Phases phases(on_phase_of(on_phase));
  const py::gil_scoped_release no_gil;
  state::write_checkpoint(path, snapshot, options, ranks, phases);
}

void agree_on_failure(const CheckpointRanks& ranks, const std::optional<std::string>& failure, bool is_damage, const std::string& what) {
  std::exception_ptr thrown;
  if (failure && is_damage) thrown = std::make_exception_ptr(ckpt::DamageError(*failure));
  if (failure && !is_damage) thrown = std::make_exception_ptr(Error(*failure));
  ranks.agree(thrown, what);
}

/// A checkpoint that is being read, and the places to which this rank's parts go.
class CheckpointReading {
 public:
  explicit CheckpointReading(const std::string& path) : source_(state::open_source(path)), transfer_(*source_) {}

  /// Returns the path of a value in nested dictionaries and lists; empty if the checkpoint does not say.
  ckpt::DcpPath path_of(const std::string& name) {
    if (!paths_) {
      paths_.emplace();
      if (source_->format() == state::Source::Format::kDcp) {
        const std::string file(ckpt::kMetadataFile);
        const auto text = ckpt::CheckedFiles(source_->path()).read_whole(file, ckpt::kMostMetadata);
        for (auto& [key, path] : ckpt::read_dcp_metadata(text, file).paths) paths_->emplace(key, std::move(path));
      }
    }
    const auto found = paths_->find(name);
    return found == paths_->end() ? ckpt::DcpPath() : found->second;
  }

  state::Source& source() { return *source_; }
  state::Transfer& transfer() { return transfer_; }
  /// `to` is contiguous, and gets the box of the tensor at `offsets`.
  void add(const std::string& name, Sizes offsets, const at::Tensor& to) {
    const ckpt::Box box = {std::move(offsets), to.sizes().vec()};
    transfer_.add(name, box, 0, to.detach().view({-1}));
  }

 private:
  std::unique_ptr<state::Source> source_;
  state::Transfer transfer_;
  std::optional<std::map<std::string, ckpt::DcpPath>> paths_;  // set at the first call of path_of()
};

py::tuple take_newest(const std::string& folder, const CheckpointRanks& ranks, const py::function& load_one) {
  const auto call = [&](const std::string& path) {
    const py::gil_scoped_acquire gil;
    try {
      load_one(path);
    } catch (py::error_already_set& error) {
      rethrow_as_error(error);
    }
  };
  const auto taken = [&] {
    const py::gil_scoped_release no_gil;
    return state::take_newest(folder, ranks, call);
  }();
  return py::make_tuple(taken.path, taken.skipped, taken.warning);
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  py::class_<CheckpointRanks>(module, "CheckpointRanks", "The ranks that write or read a checkpoint together. All methods are collective.")
      .def(py::init<const DeviceMesh&>(), py::arg("mesh"))
      .def_property_readonly("size", &CheckpointRanks::size)
      .def_property_readonly("index", &CheckpointRanks::index)
      .def(
          "exchange",
          [](const CheckpointRanks& ranks, const std::string& text, const std::string& operation) {
            std::vector<std::string> all;
            {
              const py::gil_scoped_release no_gil;
              all = ranks.gather_everywhere(text, operation.c_str());
            }
            py::list list;
            for (const auto& one : all) list.append(py::bytes(one));
            return list;
          },
          py::arg("text"), py::arg("operation"), "Every rank's bytes, on all.")
      .def("agree", &agree_on_failure, py::arg("failure"), py::arg("is_damage"), py::arg("what"), kWithoutGil,
           "Raises Error on all ranks if one has failed: DamageError, if damage is all that was found.");
  py::class_<Snapshot>(module, "Snapshot", "What one rank writes of a checkpoint.")
      .def(py::init<>())
      .def("add_tensor", &add_tensor, py::arg("path"), py::arg("shape"), py::arg("offsets"), py::arg("values"), kWithoutGil,
           "This rank's part of a tensor: the box at these offsets. It is not copied.")
      .def("add_value", &add_value, py::arg("path"), py::arg("value"), "A plain value.")
      .def("check_names", &state::check_names, kWithoutGil, "Raises Error for two items of one name.")
      .def_property_readonly("bytes", &state::bytes_of, "Of tensors.");
  py::class_<state::HostBuffer>(module, "HostBuffer", "Host memory that takes parts, used again from save to save.")
      .def(py::init<c10::Device>(), py::arg("device"))
      .def("take", &state::HostBuffer::begin, py::arg("parts"), kWithoutGil, "Copies all of them; they lie here then.");
  module.def("write_checkpoint", &write, py::arg("path"), py::arg("parts"), py::arg("ranks"), py::kw_only(), py::arg("keep_last"),
             py::arg("keep_every"), py::arg("keep_best"), py::arg("on_phase"), "As fsdp::save. Collective.");
  py::class_<CheckpointReading>(module, "CheckpointReading", "A checkpoint that is read, DCP's or safetensors.")
      .def(py::init<const std::string&>(), py::arg("path"), kWithoutGil)
      .def(
          "advice_on_prefixes",
          [](CheckpointReading& reading, const std::string& text, const std::string& option) {
            return state::advice_on_prefixes(state::prefixes_before(reading.source().names(), text), option);
          },
          py::arg("text"), py::arg("option"), "Says below which prefixes the names have this text; empty if none has.")
      .def_property_readonly("names", [](CheckpointReading& reading) { return reading.source().names(); })
      .def_property_readonly(
          "saved", [](CheckpointReading& reading) { return reading.source().saved(); }, "Tells it from others that were saved, or is 0.")
      .def(
          "shape",
          [](CheckpointReading& reading, const std::string& name) -> std::optional<Sizes> {
            const auto tensor = reading.source().find(name);
            return tensor ? std::optional(tensor->shape) : std::nullopt;
          },
          py::arg("name"), "Of a tensor; None for anything else.")
      .def(
          "value", [](CheckpointReading& reading, const std::string& name) { return object_of(reading.source().read_object(name)); },
          py::arg("name"), "A plain value.")
      .def(
          "tensor", [](CheckpointReading& reading, const std::string& name) { return reading.source().read_whole(name).clone(); },
          py::arg("name"), kWithoutGil, "All of a tensor.")
      .def("path", &CheckpointReading::path_of, py::arg("name"), kWithoutGil,
           "Where a value is in nested dictionaries and lists; empty if the checkpoint does not say.")
      .def("add", &CheckpointReading::add, py::arg("name"), py::arg("offsets"), py::arg("to"), kWithoutGil,
           "Notes where a box of a tensor goes.")
      .def_property_readonly(
          "bytes", [](CheckpointReading& reading) { return reading.transfer().bytes(); }, "Of what was added.")
      .def(
          "check", [](CheckpointReading& reading) { reading.transfer().check(); }, kWithoutGil,
          "Reads what was added, and compares it with its checksums.")
      .def(
          "assign",
          [](CheckpointReading& reading, bool at_once) { at_once ? reading.transfer().read_at_once() : reading.transfer().read(); },
          py::arg("at_once"), kWithoutGil, "Brings it to its place, after check(); at once: instead of it.");
  module.def(
      "take_newest", &take_newest, py::arg("folder"), py::arg("ranks"), py::arg("load_one"),
      "Loads the newest checkpoint that is whole. Returns its path or None, newer ones that were skipped, and a warning. Collective.");
  module.def("latest", &latest, py::arg("folder"), kWithoutGil, "As fsdp::latest.");
  module.def("best", &best, py::arg("folder"), kWithoutGil, "As fsdp::best.");
}

}  // namespace fsdp::bindings
