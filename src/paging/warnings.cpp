#include "paging/warnings.h"

#include <c10/util/Exception.h>

#include <cstddef>
#include <string>
#include <vector>

#include "base/text.h"
#include "paging/paged_model.h"

namespace fsdp::paging {
namespace {

constexpr std::size_t kNamed = 20;

/// True if the parameter still requires a gradient, as it did in fully_shard.
bool is_trained(const engine::UnitParameter& parameter) {
  const auto tensor = parameter.tensor.lock();
  return parameter.trainable && tensor && tensor->requires_grad();
}

}  // namespace

void warn_of_grad(engine::Engine& engine, const engine::UnitParameter& parameter) {
  if (PagedModel::of(engine).warned_of_grad.exchange(true)) return;
  TORCH_WARN("fsdp: grad() of the sharded parameter '", parameter.name,
             "' was asked for. It is always undefined, as gradients are in the shards: torch::optim's optimizers, "
             "torch::nn::utils::clip_grad_norm_ and the module's zero_grad() find nothing and do nothing. Use fsdp::AdamW, fsdp::SGD or "
             "fsdp::wrap; fsdp::clip_grad_norm; zero_grad() of the optimizer or of the handle. gradient_shards() and full_gradients() show "
             "gradients. (Said once per model.)");
}

void warn_of_unused(engine::Engine& engine) {
  auto& model = PagedModel::of(engine);
  if (model.checked_unused) return;
  std::vector<std::string> unused;
  bool any = false;
  for (const auto& unit : engine.units()) {
    if (!unit->options.requires_gradient_sync || (unit->communicators.outer && !unit->options.requires_all_reduce)) return;
    for (const auto& parameter : unit->parameters) {
      any = any || parameter.has_gradient;
      if (is_trained(parameter) && !parameter.has_gradient && !unit->attendance.optional) unused.push_back(in_quotes(parameter.name));
    }
  }
  if (!any) return;
  model.checked_unused = true;
  if (unused.empty() || engine.options().mesh.rank() != 0) return;
  TORCH_WARN(
      "fsdp: the first backward gave no gradient on any rank to ", first_names(unused, kNamed),
      ", which need one: nothing that led to the loss used them. Optimizers skip them for as long as that is so, but they are "
      "sharded, gathered and kept. If that is not intended: parameters are tied by fsdp::tie_parameters before fully_shard, and frozen by "
      "requires_grad_(false). (Said once per model.)");
}

}  // namespace fsdp::paging
