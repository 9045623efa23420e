#include "torch_python/shown_model.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/outside_transforms.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "torch_python/freed_with_gil.h"

namespace py = pybind11;

namespace fsdp::torch_python {
namespace {

/// The gradients of a unit: one for each parameter, or nothing. On request, also one flat tensor over the memory of all of them, if they
/// have the same dtype.
struct TakenGradients {
  std::vector<std::optional<at::Tensor>> of_parameters;
  std::optional<at::Tensor> together;
};

TakenGradients take_gradients(engine::Engine& engine, ShownUnit& shown, bool together) {
  auto& unit = shown.unit();
  TakenGradients taken;
  taken.of_parameters.resize(unit.parameters.size());
  std::vector<bool> has_gradient;
  for (const auto& parameter : unit.parameters) has_gradient.push_back(parameter.has_gradient);
  const auto gradients = engine.main().take_gradients(unit);
  if (gradients.empty()) return taken;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < has_gradient.size(); ++i) {
    if (!has_gradient[i]) continue;
    taken.of_parameters[i] = shown.gradient_shard(gradients, i);
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

void ShownModel::begin_forward() {
  {
    const py::gil_scoped_release no_gil;
    const OutsideTransforms outside;
    HookedModel::begin_forward();
  }
  for (std::size_t k = 0; k < units().size(); ++k) unit(k).settle();
}

std::vector<std::size_t> ShownModel::with_other_parameters() {
  std::vector<std::size_t> found;
  for (std::size_t k = 0; k < units().size(); ++k) {
    if (!unit(k).has_its_parameters()) found.push_back(k);
  }
  return found;
}

bool ShownModel::has_gradients() const {
  for (std::size_t k = 0; k < units().size(); ++k) {
    if (unit(k).has_gradients()) return true;
  }
  return false;
}

void ShownModel::hide_after_backward() {
  for (std::size_t k = 0; k < units().size(); ++k) {
    if (unit(k).unit().options.reshard_after_backward) unit(k).hide();
  }
}

void ShownModel::on_backward_end(py::function callback) {
  HookedModel::on_backward_end([this, held = freed_with_gil<py::function>(std::move(callback))] {
    const py::gil_scoped_acquire gil;
    if (!(*held)().is_none()) return;
    for (std::size_t k = 0; k < units().size(); ++k) {
      if (unit(k).has_all_reduce_hook) {
        throw Error("unit '" + unit(k).unit().name +
                    "': its module was collected between forward and backward, and with it the hook of set_all_reduce_hook; keep the model "
                    "until backward has ended");
      }
    }
    deliver_gradients({});
  });
}

std::vector<std::size_t> ShownModel::deliver_gradients(const std::map<std::size_t, py::object>& hooks) {
  std::vector<std::size_t> with_own_hooks;
  std::vector<py::object> with_hooks;
  std::string refused;
  for (std::size_t k = 0; k < units().size(); ++k) {
    const auto hook = hooks.find(k);
    const bool has_hook = hook != hooks.end();
    TakenGradients taken;
    {
      const py::gil_scoped_release no_gil;
      taken = take_gradients(*engine(), unit(k), has_hook);
    }
    if (has_hook && taken.together) hook->second(*taken.together);
    const bool has_gradients = std::ranges::any_of(taken.of_parameters, [](const auto& one) { return one.has_value(); });
    if (unit(k).deliver(taken.of_parameters, with_hooks)) with_own_hooks.push_back(k);
    if (has_hook && has_gradients && !taken.together) {
      refused = "set_all_reduce_hook: the gradients of unit '" + unit(k).unit().name +
                "' have several dtypes, and the hook takes one tensor, so it was not called; give the parameters of each dtype a "
                "fully_shard of their own, or one reduce_dtype";
    }
  }
  run_hooks(with_hooks);
  if (!refused.empty()) throw Error(refused);
  return with_own_hooks;
}

void note_step(const std::vector<std::shared_ptr<ShownUnit>>& units) {
  const hooks::HookedModel* refused = nullptr;  // Units of one model follow one another.
  for (const auto& unit : units) {
    const auto model = unit->model();
    if (model != nullptr && std::exchange(refused, model.get()) != model.get()) model->engine()->main().refuse_export();
  }
  for (const auto& unit : units) ++unit->steps;
}

void note_update(const std::vector<std::shared_ptr<ShownUnit>>& units) {
  hooks::note_update();
  const hooks::HookedModel* noted = nullptr;  // Units of one model follow one another.
  for (const auto& unit : units) {
    const auto model = unit->model();
    if (model != nullptr && std::exchange(noted, model.get()) != model.get()) model->note_own_update();
  }
}

}  // namespace fsdp::torch_python
