#include "bindings/planned_units.h"

#include <utility>

#include "engine/engine.h"

namespace fsdp::bindings {

using planning::Visit;

namespace {

Visit::What what_of(const std::string& name) {
  if (name == "use") return Visit::What::kUse;
  return name == "begin" ? Visit::What::kBegin : Visit::What::kEnd;
}

std::int64_t optimizer_bytes(const hooks::HookedUnit& unit, std::int64_t values) {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < unit.spec().parameters.size(); ++i) {
    const auto& parameter = unit.spec().parameters[i];
    if (!parameter.trainable) continue;
    std::int64_t numel = 1;
    for (const auto size : unit.shard_shape(i)) numel *= size;
    bytes += values * numel * static_cast<std::int64_t>(c10::elementSize(parameter.dtype));
  }
  return bytes;
}

}  // namespace

planning::Passes passes_of(const std::vector<GivenVisit>& visits) {
  planning::Passes passes;
  for (const auto& [what, unit, enters, gradients] : visits) {
    passes.forward.push_back({.what = what_of(what), .unit = unit, .enters = enters, .gradients = gradients});
  }
  passes.backward = planning::reversed(passes.forward);
  return passes;
}

engine::Unit& PlannedEngine::add(hooks::HookedUnit& hooked, std::optional<std::size_t> parent, std::int64_t values) {
  of_optimizer.push_back(optimizer_bytes(hooked, values));
  auto& unit = engine->add(hooked.release({}));
  if (parent) unit.place.parent = engine->units()[*parent].get();
  unit.allocate_main(engine->accounting());
  return unit;
}

std::function<void(planning::Highest&)> PlannedEngine::updates() const {
  PlanBytes kept;
  for (const auto& unit : engine->units()) {
    (unit->offloaded() ? kept.host : kept.optimizer_state) += of_optimizer[unit->place.index];
  }
  return [kept, has_state = false](planning::Highest& highest) mutable {
    if (std::exchange(has_state, true)) return;
    highest.outside.optimizer_state += kept.optimizer_state;
    highest.outside.host += kept.host;
    highest.look();
  };
}

}  // namespace fsdp::bindings
