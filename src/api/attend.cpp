#include "fsdp/attend.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <vector>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "paging/paged_model.h"
#include "paging/paged_storage.h"
#include "trigger/autograd_pass.h"

namespace fsdp {

void attend(const torch::nn::Module& module, bool present, const AttendOptions& options) {
  if (trigger::inside_backward()) return;
  std::set<const c10::TensorImpl*> parameters;
  engine::Engine* engine = nullptr;
  for (const auto& parameter : module.parameters()) {
    const auto* storage = paging::PagedStorage::of(parameter);
    if (storage == nullptr || storage->unit == nullptr) continue;
    engine = storage->engine;
    parameters.insert(parameter.unsafeGetTensorImpl());
  }
  std::vector<engine::Unit*> units;
  for (std::size_t k = 0; engine != nullptr && k < engine->units().size(); ++k) {
    auto& unit = *engine->units()[k];
    const bool inside = std::all_of(unit.parameters.begin(), unit.parameters.end(), [&](const engine::UnitParameter& parameter) {
      return parameters.count(parameter.tensor.lock().get()) > 0;
    });
    if (inside && !unit.parameters.empty()) units.push_back(&unit);
  }
  if (units.empty()) {
    throw Error("attend: module '" + module.name() +
                "' contains no unit, so its parameters are gathered and reduced with those of an enclosing unit; make it a unit "
                "(FullyShardOptions::units)");
  }
  paging::PagedModel::of(*engine).gate.alone([&] {
    engine->attend(units,
                   {.present = present, .divide_by_present = options.divide_by_present, .backward_may_follow = at::GradMode::is_enabled()});
  });
}

}  // namespace fsdp
