#include "bindings/delivered_gradients.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "engine/engine.h"
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

}  // namespace

bool deliver_gradients(ShownUnit& shown, const py::object& hook, std::string& refused) {
  const bool has_hook = !hook.is_none();
  TakenGradients taken;
  {
    const py::gil_scoped_release no_gil;
    taken = take_gradients(shown, has_hook);
  }
  if (has_hook && taken.together) hook(*taken.together);
  const bool has_gradients = std::ranges::any_of(taken.of_parameters, [](const auto& one) { return one.has_value(); });
  const bool has_own_hooks = shown.deliver(taken.of_parameters);
  if (has_hook && has_gradients && !taken.together) {
    refused = "set_all_reduce_hook: the gradients of unit '" + shown.hooked()->unit().name +
              "' have several dtypes, and the hook takes one tensor, so it was not called; give the parameters of each dtype a "
              "fully_shard of their own, or one reduce_dtype";
  }
  return has_own_hooks;
}

}  // namespace fsdp::bindings
