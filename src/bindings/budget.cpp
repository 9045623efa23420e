// The choice of a memory budget for models that Python's fully_shard makes.

#include "plan/budget.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/planned_units.h"
#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "plan/planned_mesh.h"
#include "plan/seen_settings.h"
#include "torch_python/shown_model.h"

namespace py = pybind11;

namespace fsdp::bindings {

using planning::Choice;
using planning::Observed;

namespace {

/// A unit of a model, as it will be planned.
struct PlannedSpec {
  hooks::UnitSpec spec;
  std::optional<std::size_t> parent;
};

/// The units of a model, on planned meshes.
std::vector<PlannedSpec> specs_of(const std::vector<GivenUnit>& units, const planning::SeenSettings& settings) {
  std::vector<PlannedSpec> specs;
  std::vector<std::pair<std::pair<bool, std::int64_t>, planning::PlannedMeshes>> twins;
  for (const auto& [shown, parent, _] : units) {
    auto spec = shown->spec();
    spec.name = shown->unit().name;
    spec.options = shown->unit().options;
    spec.options.kept_by_budget = false;
    settings.apply_to(spec.options, specs.size());
    const std::pair key{spec.separate_reduce_group, spec.post_forward_size};
    auto found = std::ranges::find(twins, key, &decltype(twins)::value_type::first);
    if (found == twins.end()) found = twins.insert(twins.end(), {key, planning::PlannedMeshes(key.first, key.second)});
    spec.mesh = found->second.of(spec.mesh);
    specs.push_back({.spec = std::move(spec), .parent = parent});
  }
  return specs;
}

struct PlannedSpecs {
  DeviceMesh mesh;
  std::vector<PlannedSpec> units;
  planning::Passes passes;
  std::vector<std::int64_t> activations;
  std::vector<std::int64_t> kept_if_recomputed;
  std::int64_t optimizer_values = 2;
  planning::Microbatches microbatches;

  std::string accumulation() const {
    const auto reduces = [](const PlannedSpec& unit) {
      return unit.spec.options.requires_gradient_sync && unit.spec.options.requires_all_reduce;
    };
    return planning::accumulation_text(microbatches, std::ranges::all_of(units, reduces));
  }

  Observed observe(const Choice& choice) const {
    PlannedEngine planned{.engine = std::make_shared<engine::Engine>(engine::EngineOptions{
                              .mesh = mesh, .tensor_parallel = {}, .prefetch_depth = choice.prefetch_depth, .events_source = 0})};
    for (std::size_t k = 0; k < units.size(); ++k) {
      hooks::HookedUnit hooked(units[k].spec);
      planned.add(hooked, units[k].parent, optimizer_values).options.kept_by_budget = !choice.kept.empty() && choice.kept[k];
    }
    planning::PlannedSteps steps(planned.engine, passes, planning::Trigger::kHooks, planned.updates());
    steps.set_activations(planning::unit_activations(activations, kept_if_recomputed, choice.recomputed));
    steps.set_microbatches(microbatches);
    return steps.observe();
  }

  /// Returns the bytes that it needs if `change` is made to its units.
  std::int64_t bytes_with(const Choice& choice, const std::function<void(hooks::UnitSpec&)>& change) const {
    auto changed = *this;
    for (auto& unit : changed.units) change(unit.spec);
    return changed.observe(choice).most;
  }
};

bool has_bf16(const PlannedSpec& unit) { return unit.spec.param_dtype.has_value(); }

std::vector<planning::Remedy> remedies_for(const PlannedSpecs& model, const Choice& choice) {
  std::vector<planning::Remedy> remedies;
  const auto add = [&](std::string option, std::function<void(hooks::UnitSpec&)> change) {
    remedies.push_back(
        {.option = std::move(option), .bytes = [=, change = std::move(change)] { return model.bytes_with(choice, change); }});
  };
  const auto sharded = Placements::optim_grads_params();
  if (!model.accumulation().empty()) {
    add("set_requires_gradient_sync(True) for each backward", [](auto& spec) {
      spec.options.requires_gradient_sync = true;
      spec.options.requires_all_reduce = true;
    });
  }
  add("reshard_after_forward=True", [](auto& spec) { spec.options.after_forward = engine::AfterForward::kReshard; });
  if (std::ranges::any_of(model.units, [&](const auto& unit) { return unit.spec.options.placements != sharded; })) {
    add("placements='optim_grads_params'", [=](auto& spec) { spec.options.placements = sharded; });
  }
  if (std::ranges::none_of(model.units, has_bf16)) {
    add("mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)", [](auto& spec) {
      spec.param_dtype = at::kBFloat16;
      for (auto& parameter : spec.parameters) {
        if (at::isFloatingType(parameter.dtype)) parameter.param_dtype = at::kBFloat16;
      }
    });
  }
  add("offload_policy=CPUOffloadPolicy()", [](auto& spec) { spec.options.offload = Offload::kAll; });
  if (!std::ranges::all_of(model.units, [&](const auto& unit) { return unit.spec.mesh.size() == model.mesh.size(); })) return remedies;
  for (const auto& mesh : planning::larger_meshes(model.mesh)) {
    remedies.push_back({.option = std::to_string(mesh.size()) + " ranks", .bytes = [=] {
                          auto larger = model;
                          larger.mesh = mesh;
                          return larger.bytes_with(choice, [&](auto& spec) { spec.mesh = mesh; });
                        }});
  }
  return remedies;
}

/// Returns the prefetch depth, which units are kept, which recompute, and the explanation. `kept_if_recomputed`: see
/// planning::unit_activations. `microbatches`: what the program has given.
std::tuple<int, std::vector<bool>, std::vector<bool>, std::string> choose(const std::vector<GivenUnit>& units,
                                                                          const std::vector<GivenVisit>& visits,
                                                                          const std::vector<std::int64_t>& kept_if_recomputed,
                                                                          const planning::SeenSettings& settings, std::int64_t bytes,
                                                                          std::int64_t optimizer_values, int prefetch_depth,
                                                                          std::int64_t microbatches) {
  const py::gil_scoped_release no_gil;
  auto specs = specs_of(units, settings);
  const auto mesh = specs.front().spec.mesh;  // the root's
  PlannedSpecs model{.mesh = mesh,
                     .units = std::move(specs),
                     .passes = passes_of(visits),
                     .activations = {},
                     .kept_if_recomputed = kept_if_recomputed,
                     .optimizer_values = optimizer_values,
                     .microbatches = settings.microbatches({.count = microbatches})};
  planning::Budget budget{.bytes = bytes,
                          .given = {.prefetch_depth = prefetch_depth},
                          .recomputable = {},
                          .accumulation = model.accumulation(),
                          .observe = [&](const Choice& choice) { return model.observe(choice); }};
  for (const auto& [shown, parent, activations] : units) model.activations.push_back(activations);
  for (const auto kept : kept_if_recomputed) budget.recomputable.push_back(kept != planning::kNeverRecomputed);
  auto chosen = planning::choose(budget);
  if (!chosen.fits) {
    // With another option, the least prefetch depth may be another one. It needs least without read-ahead.
    auto least = chosen.choice;
    least.prefetch_depth = 0;
    throw Error(planning::too_small(budget, chosen, remedies_for(model, least)));
  }
  chosen.choice.kept.resize(units.size());
  chosen.choice.recomputed.resize(units.size());
  return {chosen.choice.prefetch_depth, std::move(chosen.choice.kept), std::move(chosen.choice.recomputed), std::move(chosen.explanation)};
}

}  // namespace

void bind_budget(py::module_& module) {
  py::class_<planning::SeenSettings>(module, "SeenSettings", "What a program sets between steps, as far as a memory budget depends on it.")
      .def(py::init<>())
      .def(
          "grown",
          [](const planning::SeenSettings& settings, torch_python::ShownModel& model, bool looks) {
            return settings.grown(model.engine()->units(), looks && !settings.gradients_add_up() && model.has_gradients());
          },
          py::arg("model"), py::kw_only(), py::arg("looks"),
          "With the settings that the model's units have now; None if a step does not need more with them. With `looks`, gradients that "
          "parameters have show that those of several backwards add up.");
  module.def(
      "choose_within_budget", &choose, py::arg("units"), py::arg("visits"), py::arg("kept_if_recomputed"), py::arg("settings"),
      py::kw_only(), py::arg("bytes"), py::arg("optimizer_values"), py::arg("prefetch_depth"), py::arg("microbatches"),
      "The prefetch depth, which of these units of a model are kept from forward into backward, which recompute, and why. Raises Error if "
      "nothing fits. A unit for which kept_if_recomputed is -1 never recomputes.");
  module.def(
      "choose_kept",
      [](const std::vector<std::int64_t>& loads, const std::vector<std::tuple<std::size_t, std::size_t, std::int64_t, std::int64_t>>& units,
         std::int64_t limit) {
        std::vector<planning::Keepable> keepable;
        for (const auto& [begin, end, bytes, saved] : units) keepable.push_back({begin, end, bytes, saved});
        auto found = planning::choose_kept(loads, keepable, limit);
        return std::tuple{std::move(found.kept), found.saved, found.peak};
      },
      py::arg("loads"), py::arg("units"), py::arg("limit"),
      "Which units (begin, end, bytes, saved) are kept, what that saves, and the peak.");
}

}  // namespace fsdp::bindings
