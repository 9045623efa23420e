#include "bindings/delivered_gradients.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "hooks/hooked_model.h"

namespace py = pybind11;

namespace fsdp::bindings {

using torch_python::ShownUnit;

namespace {

/// The gradients of a unit: one for each parameter, or nothing. On request, also one flat tensor over the memory of all of them, if they
/// have the same dtype.
struct TakenGradients {
  std::vector<std::optional<at::Tensor>> of_parameters;
  std::optional<at::Tensor> together;
};

TakenGradients take_gradients(const ShownUnit& shown, bool together) {
  auto& hooked = *shown.hooked();
  auto& unit = hooked.unit();
  TakenGradients taken;
  taken.of_parameters.resize(unit.parameters.size());
  std::vector<bool> has_gradient;
  for (const auto& parameter : unit.parameters) has_gradient.push_back(parameter.has_gradient);
  const auto gradients = hooked.model()->engine().main().take_gradients(unit);
  if (gradients.empty()) return taken;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < has_gradient.size(); ++i) {
    if (!has_gradient[i]) continue;
    taken.of_parameters[i] = hooked.gradient_shard(gradients, i);
  }
  if (!together) return taken;
  const auto& first = gradients.front();
  const auto alike = [&](const at::Tensor& part) { return part.scalar_type() == first.scalar_type(); };
  if (std::all_of(gradients.begin(), gradients.end(), alike)) taken.together = at::empty({0}, first.options()).set_(first.storage());
  return taken;
}

/// Calls the shards' hooks on accumulated gradients, once for each shard.
void run_hooks(const std::vector<py::object>& shards) {
  std::unordered_set<PyObject*> seen;
  for (const auto& shard : shards) {
    if (!seen.insert(shard.ptr()).second) continue;
    const py::list hooks(shard.attr("_post_accumulate_grad_hooks").attr("values")());
    for (const auto hook : hooks) hook(shard);
  }
}

}  // namespace

std::vector<std::size_t> deliver_gradients(const std::vector<std::shared_ptr<ShownUnit>>& units,
                                           const std::map<std::size_t, py::object>& hooks) {
  std::vector<std::size_t> with_own_hooks;
  std::vector<py::object> with_hooks;
  std::string refused;
  for (std::size_t k = 0; k < units.size(); ++k) {
    const auto hook = hooks.find(k);
    const bool has_hook = hook != hooks.end();
    TakenGradients taken;
    {
      const py::gil_scoped_release no_gil;
      taken = take_gradients(*units[k], has_hook);
    }
    if (has_hook && taken.together) hook->second(*taken.together);
    const bool has_gradients = std::ranges::any_of(taken.of_parameters, [](const auto& one) { return one.has_value(); });
    if (units[k]->deliver(taken.of_parameters, with_hooks)) with_own_hooks.push_back(k);
    if (has_hook && has_gradients && !taken.together) {
      refused = "set_all_reduce_hook: the gradients of unit '" + units[k]->hooked()->unit().name +
                "' have several dtypes, and the hook takes one tensor, so it was not called; give the parameters of each dtype a "
                "fully_shard of their own, or one reduce_dtype";
    }
  }
  run_hooks(with_hooks);
  if (!refused.empty()) throw Error(refused);
  return with_own_hooks;
}

}  // namespace fsdp::bindings
