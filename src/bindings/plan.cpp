// Plans of models as Python's fully_shard makes them.

#include "fsdp/plan.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text.h"
#include "bindings/bindings.h"
#include "bindings/planned_units.h"
#include "engine/engine.h"
#include "fsdp/goodput.h"
#include "fsdp/simulate.h"
#include "fsdp/size.h"
#include "plan/fsdp2_memory.h"
#include "plan/planned_step.h"
#include "torch_python/shown_unit.h"

namespace py = pybind11;

namespace fsdp::bindings {

namespace {

Plan plan(const DeviceMesh& mesh, const std::vector<GivenUnit>& units, const std::vector<GivenVisit>& visits, std::int64_t optimizer_values,
          int prefetch_depth, std::int64_t keep_gathered_bytes, std::int64_t microbatches) {
  const py::gil_scoped_release no_gil;
  PlannedEngine planned{.engine = std::make_shared<engine::Engine>(engine::EngineOptions{.mesh = mesh,
                                                                                         .tensor_parallel = {},
                                                                                         .prefetch_depth = prefetch_depth,
                                                                                         .keep_gathered_bytes = keep_gathered_bytes,
                                                                                         .events_source = 0})};
  std::vector<std::int64_t> activations;
  for (const auto& [shown, parent, bytes] : units) {
    planned.add(*shown, parent, optimizer_values);
    activations.push_back(bytes);
  }
  auto passes = passes_of(visits);
  const auto shard_dim = [&units](std::size_t unit, std::size_t parameter) {
    return std::get<0>(units[unit])->spec().parameters[parameter].shard_dim;
  };
  const auto fsdp2 = planning::fsdp2_memory({.engine = *planned.engine,
                                             .passes = passes,
                                             .activations = activations,
                                             .optimizer_values = optimizer_values,
                                             .root_stays = false,  // The unit's option determines it.
                                             .shard_dim = shard_dim});
  planning::PlannedSteps steps(planned.engine, std::move(passes), planning::Trigger::kHooks, planned.updates());
  steps.set_activations(planning::unit_activations(activations));
  steps.set_microbatches({.count = microbatches});
  auto plan = steps.run();
  if (microbatches == 1) plan.fsdp2 = fsdp2;
  for (std::size_t k = 0; k < plan.units.size(); ++k) {
    plan.units[k].optimizer_state = planned.of_optimizer[k];
    plan.units[k].checkpoint += planning::part_in_checkpoint(*planned.engine->units()[k], planned.of_optimizer[k]);
  }
  return plan;
}

/// `units`: milliseconds forward and backward by name; `links`: microseconds and bytes per second.
Simulation simulate_plan(const Plan& plan, const std::map<std::string, std::pair<double, double>>& units,
                         const std::map<std::string, std::pair<double, double>>& links, double update_ms, std::int64_t steps,
                         const std::map<std::int64_t, double>& slow_ranks, double jitter, std::uint64_t seed) {
  const py::gil_scoped_release no_gil;
  SimulationOptions options{.update_ms = update_ms, .steps = steps, .slow_ranks = slow_ranks, .jitter = jitter, .seed = seed};
  for (const auto& [name, time] : units) options.units[name] = {.forward_ms = time.first, .backward_ms = time.second};
  for (const auto& [dim, rate] : links) options.links[dim] = {.latency_us = rate.first, .bytes_per_s = rate.second};
  return simulate(plan, options);
}

DeviceMesh planned_mesh(const std::string& device_type, const std::vector<std::string>& dims, const std::vector<std::int64_t>& sizes,
                        std::int64_t ranks_per_host, bool shared_memory, std::int64_t rank) {
  std::vector<MeshDim> all;
  for (std::size_t d = 0; d < dims.size(); ++d) all.push_back({dims[d], sizes[d]});
  return planned_device_mesh(device_type, std::move(all), {.ranks_per_host = ranks_per_host, .shared_memory = shared_memory, .rank = rank});
}

}  // namespace

void bind_plan(py::module_& module) {
  module.def(
      "parse_size", [](const std::string& text) { return parse_size(text); }, py::arg("text"));
  module.def("size_text", &size_text, py::arg("bytes"));
  module.def("planned_mesh", &planned_mesh, py::arg("device_type"), py::arg("dims"), py::arg("sizes"), py::kw_only(),
             py::arg("ranks_per_host"), py::arg("shared_memory"), py::arg("rank"), "A mesh that need not exist, for plan().");
  module.def("plan", &plan, py::arg("mesh"), py::arg("units"), py::arg("visits"), py::kw_only(), py::arg("optimizer_values"),
             py::arg("prefetch_depth"), py::arg("keep_gathered_bytes"), py::arg("microbatches"),
             "What training of these units needs and sends. The units can't be used for anything else.");
  py::class_<Plan>(module, "Plan", "What a rank needs and sends in one step.")
      .def("text", &Plan::text)
      .def("json", &Plan::json)
      .def("svg", &Plan::svg)
      .def("saver_memory", &Plan::saver_memory, py::arg("hosts"), "Bytes of host memory that AsyncSaver takes.")
      .def("simulate", &simulate_plan, py::kw_only(), py::arg("units"), py::arg("links"), py::arg("update_ms"), py::arg("steps"),
           py::arg("slow_ranks"), py::arg("jitter"), py::arg("seed"), "Steps of it on all ranks, with a time for everything.");
  py::class_<Simulation>(module, "Simulation", "The times of simulated steps.")
      .def_readonly("step_ms", &Simulation::step_ms)
      .def_readonly("compute_ms", &Simulation::compute_ms)
      .def_readonly("exposed_ms", &Simulation::exposed_ms)
      .def_readonly("exposed_by_unit_ms", &Simulation::exposed_by_unit_ms)
      .def("average_ms", &Simulation::average_ms);
  py::class_<Goodput>(module, "Goodput", "What became of the time of a run that fails.")
      .def_readonly("seconds", &Goodput::seconds)
      .def_readonly("failures", &Goodput::failures)
      .def_readonly("fraction", &Goodput::fraction)
      .def_readonly("checkpoints", &Goodput::checkpoints)
      .def_readonly("lost", &Goodput::lost)
      .def_readonly("restarts", &Goodput::restarts);
  module.def(
      "simulate_failures",
      [](double between_failures, double checkpoint, double restart, double interval, double training, std::uint64_t seed) {
        return simulate_failures({.between_failures = between_failures,
                                  .checkpoint = checkpoint,
                                  .restart = restart,
                                  .interval = interval,
                                  .training = training,
                                  .seed = seed});
      },
      py::kw_only(), py::arg("between_failures"), py::arg("checkpoint"), py::arg("restart"), py::arg("interval"), py::arg("training"),
      py::arg("seed"), "A run that saves checkpoints and fails; all times in seconds.");
  module.def("best_checkpoint_interval", &best_checkpoint_interval, py::arg("between_failures"), py::arg("checkpoint"),
             "The interval for which training takes the shortest time, in seconds.");
}

}  // namespace fsdp::bindings
