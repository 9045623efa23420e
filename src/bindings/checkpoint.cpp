// Checkpoints. The library handles files, checksums and commits; Python collects the values of the model and the optimizer, with their
// names.

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/any_strides.h"
#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "fsdp/save_load.h"
#include "hooks/hooked_model.h"
#include "state/extra.h"
#include "state/load_plan.h"
#include "state/memory_steps.h"
#include "state/memory_tier.h"
#include "state/phases.h"
#include "state/ranks.h"
#include "state/scalar_type.h"
#include "state/snapshot.h"
#include "state/source.h"
#include "state/take_newest.h"
#include "torch_python/python_value.h"

namespace py = pybind11;

namespace fsdp::bindings {

using torch_python::value_from;

namespace {

using Sizes = std::vector<std::int64_t>;
using state::CheckpointRanks;
using state::key_of;
using state::LoadPlan;
using state::Snapshot;

const auto kWithoutGil = py::call_guard<py::gil_scoped_release>();

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

using TellPhase = std::function<void(const std::string& phase, std::int64_t bytes, double seconds)>;

OnPhase on_phase_of(TellPhase function) {
  if (!function) return {};
  return [function = std::move(function)](const PhaseReport& report) {
    static constexpr std::array<const char*, 7> kNames = {"collect", "write", "commit", "prune", "open", "check", "assign"};
    try {
      function(kNames.at(static_cast<std::size_t>(report.phase)), report.bytes, report.seconds);
    } catch (py::error_already_set& error) {
      const py::gil_scoped_acquire gil;
      error.discard_as_unraisable("on_phase");
    }
  };
}

void write(const std::string& path, const Snapshot& snapshot, const CheckpointRanks& ranks, std::int64_t saved, int keep_last,
           std::int64_t keep_every, int keep_best, TellPhase on_phase) {
  const SaveOptions options = {.keep_last = keep_last, .keep_every = keep_every, .keep_best = keep_best};
  state::Phases phases(on_phase_of(std::move(on_phase)));
  state::write_checkpoint(path, snapshot, options, ranks, phases, saved);
}

void write_in_memory(state::MemoryTier& tier, const std::string& name, const Snapshot& snapshot, std::int64_t saved, TellPhase on_phase) {
  state::Phases phases(on_phase_of(std::move(on_phase)));
  tier.write(name, snapshot, saved, phases);
}

void agree_on_failure(const CheckpointRanks& ranks, const std::optional<std::string>& failure, bool is_damage, const std::string& what) {
  std::exception_ptr thrown;
  if (failure && is_damage) thrown = std::make_exception_ptr(ckpt::DamageError(*failure));
  if (failure && !is_damage) thrown = std::make_exception_ptr(Error(*failure));
  ranks.agree(thrown, what);
}

/// A tensor whose values this rank loads: its name, its shape, the offsets of the box that this rank has, its values, and other names.
using LoadItem = std::tuple<std::string, Sizes, Sizes, at::Tensor, std::vector<std::string>>;
/// An optimizer's state of a parameter: the parameter's name, the result of updated(), its tensors, and the names of its numbers.
using LoadState = std::tuple<std::string, bool, std::vector<LoadItem>, std::vector<std::string>>;

std::unique_ptr<LoadPlan> open_plan(const std::string& path, bool strict, std::function<std::string(const std::string&)> rename,
                                    std::function<bool(const std::string&)> ignore, std::string model_prefix, std::string optimizer_prefix,
                                    bool check_first, bool rng, TellPhase on_phase, state::HeldStep* held) {
  return std::make_unique<LoadPlan>(path,
                                    LoadOptions{.strict = strict,
                                                .rename = std::move(rename),
                                                .model_prefix = std::move(model_prefix),
                                                .optimizer_prefix = std::move(optimizer_prefix),
                                                .ignore = std::move(ignore),
                                                .check_first = check_first,
                                                .rng = rng,
                                                .on_phase = on_phase_of(std::move(on_phase))},
                                    held);
}

void add_items(LoadPlan& plan, const std::vector<LoadItem>& items) {
  for (const auto& [key, shape, offsets, values, aliases] : items) {
    const auto dense = row_major(values);
    plan.add({.path = {key},
              .shape = shape,
              .box = {offsets, values.sizes().vec()},
              .values = dense.view({-1}),
              .source = dense.is_alias_of(values) ? at::Tensor() : values},
             aliases);
  }
}

/// Adds the state of parameters. Returns whether the checkpoint has some of it, and the new values of its numbers.
std::vector<std::pair<bool, std::map<std::string, ckpt::PythonValue>>> add_states(LoadPlan& plan, const std::vector<LoadState>& states) {
  std::vector<std::pair<bool, std::map<std::string, ckpt::PythonValue>>> found;
  for (const auto& [parameter, is_updated, items, numbers] : states) {
    auto& [is_there, values] = found.emplace_back();
    auto keys = numbers;
    for (const auto& item : items) keys.push_back(std::get<0>(item));
    if (!is_updated) {  // there is no state then
      for (const auto& key : keys) plan.note_replaced(key);
      continue;
    }
    const auto count = std::string(state::kOptimizerPrefix) + "state." + parameter + ".step";
    if (!plan.is_ignored(count)) plan.expect(count);  // C++ counts the updates of all optimizers
    add_items(plan, items);
    is_there = std::any_of(keys.begin(), keys.end(), [&](const auto& key) { return plan.has(key); });
    for (const auto& key : numbers) {
      if (plan.begin(key)) values.emplace(key, plan.scalar(key).value());
    }
  }
  return found;
}

std::map<std::string, state::StoredValue> read_values(LoadPlan& plan, const std::vector<std::string>& keys) {
  std::map<std::string, state::StoredValue> found;
  for (const auto& key : keys) {
    if (plan.begin(key)) found.emplace(key, plan.value(key));
  }
  return found;
}

auto check_load(LoadPlan& plan, const CheckpointRanks& ranks, c10::Device device, bool has_optimizer, std::set<std::string> torn,
                bool at_once) {
  const bool all_at_once = ranks.all(at_once, "checkpoint: agreement on how it is read");
  plan.join_names(ranks);
  plan.fetch();
  Loaded loaded;
  std::vector<state::StoredItem> extra, rank_extra;
  ranks.together(state::kNothingLoaded, [&] {
    loaded = plan.check_names(ranks, {.device = device, .has_optimizer = has_optimizer, .torn = std::move(torn)});
    extra = plan.items_below(state::kExtraPrefix);
    if (state::saved_ranks(plan.source()) == ranks.size()) rank_extra = plan.items_below(state::rank_extra_prefix(ranks.index()));
    plan.check_data(all_at_once);
  });
  return std::tuple(std::move(extra), std::move(rank_extra), std::move(loaded.missing), std::move(loaded.unexpected), loaded.metric,
                    loaded.rng);
}

std::vector<std::vector<state::StoredItem>> read_rank_extra(const std::string& path) {
  const auto source = state::open_source(path);
  std::vector<std::vector<state::StoredItem>> all;
  for (std::int64_t rank = 0, ranks = state::saved_ranks(*source); rank < ranks; ++rank) {
    all.push_back(state::items_below(*source, state::rank_extra_prefix(rank)));
  }
  return all;
}

py::tuple take_newest(const std::vector<std::string>& folders, const CheckpointRanks& ranks, const py::function& load_one) {
  const auto call = [&](const std::string& path, state::HeldStep* held) {
    const py::gil_scoped_acquire gil;
    try {
      load_one(path, py::cast(held, py::return_value_policy::reference));
    } catch (py::error_already_set& error) {
      rethrow_as_error(error);
    }
  };
  const auto taken = [&] {
    const py::gil_scoped_release no_gil;
    return state::take_newest(folders, ranks, call);
  }();
  return py::make_tuple(taken.path, taken.origin, taken.skipped, taken.warning);
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
  module.def("new_saved", &ckpt::new_saved, "A number for a checkpoint, by which the newest one is found.");
  module.def("write_checkpoint", &write, py::arg("path"), py::arg("parts"), py::arg("ranks"), py::kw_only(), py::arg("saved"),
             py::arg("keep_last"), py::arg("keep_every"), py::arg("keep_best"), py::arg("on_phase"), kWithoutGil,
             "As fsdp::save. Collective.");
  py::class_<state::MemoryTier>(module, "MemoryTier", "Checkpoints in the memory of hosts. All methods are collective.")
      .def(py::init<const CheckpointRanks&, const std::string&, int>(), py::arg("ranks"), py::arg("folder"), py::arg("distance"),
           kWithoutGil, py::keep_alive<1, 2>())
      .def("write", &write_in_memory, py::arg("name"), py::arg("parts"), py::kw_only(), py::arg("saved"), py::arg("on_phase"), kWithoutGil,
           "Saves a step.")
      .def("remove", &state::MemoryTier::remove, kWithoutGil, "Removes all steps.");
  py::class_<state::HeldStep>(module, "HeldStep", "A step in the memory of hosts, to be loaded: see src/state/memory_steps.h.");
  py::class_<LoadPlan>(module, "LoadPlan", "The load of a checkpoint on this rank: see src/state/load_plan.h.")
      .def(py::init(&open_plan), py::arg("path"), py::kw_only(), py::arg("strict"), py::arg("rename"), py::arg("ignore"),
           py::arg("model_prefix"), py::arg("optimizer_prefix"), py::arg("check_first"), py::arg("rng"), py::arg("on_phase"),
           py::arg("held") = nullptr, kWithoutGil, "Opens the checkpoint at `path`, or the step that hosts hold.")
      .def("add", &add_items, py::arg("items"), kWithoutGil, "Notes where this rank's values of the model belong.")
      .def("values", &read_values, py::arg("keys"), kWithoutGil, "Those of these values that are there and not ignored.")
      .def("has_optimizer", &LoadPlan::has_optimizer, py::arg("parameters"), kWithoutGil,
           "Whether there is an optimizer's state. Raises Error if there is none, and strict.")
      .def("updated", &LoadPlan::updated, py::arg("parameters"), kWithoutGil,
           "Whether the saved optimizer had updated them, or did not have them.")
      .def("add_states", &add_states, py::arg("states"), kWithoutGil,
           "For each: whether the checkpoint has some of it, and the new values of its numbers.")
      .def("settings", &LoadPlan::settings, py::arg("parameters"), py::arg("names"), kWithoutGil,
           "The saved settings of a group of an optimizer.")
      .def("grad_scaler", &LoadPlan::grad_scaler, py::arg("names"), kWithoutGil, "The saved state of a GradScaler.")
      .def("check", &check_load, py::arg("ranks"), py::arg("device"), py::arg("has_optimizer"), py::arg("torn"), py::arg("at_once"),
           kWithoutGil, "Compares names and checks data. Returns the values of Loaded. Collective.")
      .def_property_readonly("replaced", &LoadPlan::replaced, "The names of all values that assign() replaces.")
      .def(
          "assign", [](LoadPlan& plan, const CheckpointRanks& ranks) { plan.assign(ranks, &hooks::note_load); }, py::arg("ranks"),
          kWithoutGil, "Reads the tensors to their places. Collective.");
  module.def("read_rank_extra", &read_rank_extra, py::arg("path"), kWithoutGil, "The paths and values of every rank's own values.");
  module.def(
      "generator_states",
      [](c10::Device device) {
        std::map<std::string, at::Tensor> states;
        for (auto& generator : state::generators_of(device)) states.emplace(generator.name, generator.state());
        return states;
      },
      py::arg("device"), kWithoutGil, "The states of the generators that a checkpoint keeps.");
  module.def(
      "take_newest", &take_newest, py::arg("folders"), py::arg("ranks"), py::arg("load_one"),
      "Loads the newest checkpoint that is whole, by load_one(path, held). Returns its path or None, where it was found, newer ones that "
      "were skipped, and a warning. Collective.");
  module.def("latest", &latest, py::arg("folder"), kWithoutGil, "As fsdp::latest.");
  module.def("best", &best, py::arg("folder"), kWithoutGil, "As fsdp::best.");
}

}  // namespace fsdp::bindings
