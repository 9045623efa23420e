#include "api/late_registrations.h"

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>

#include "fsdp/error.h"

namespace fsdp::api {
namespace {

/// Gives access to the parameters in place. Module's own methods copy their names.
struct Open : torch::nn::Module {
  static const auto& parameters_of(const torch::nn::Module& module) { return module.*(&Open::parameters_); }
};

using Known = std::unordered_set<const c10::TensorImpl*>;

/// A number that changes when parameters of `module`, or of modules below it, change.
std::uint64_t fingerprint(const torch::nn::Module& module, std::uint64_t before = 0) {
  for (const auto& item : Open::parameters_of(module)) {
    before = (before ^ reinterpret_cast<std::uintptr_t>(item.value().unsafeGetTensorImpl())) * 0x9E3779B97F4A7C15U;
  }
  for (const auto& child : module.children()) before = fingerprint(*child, before);
  return before;
}

void validate(const torch::nn::Module& root, const Known& known) {
  for (const auto& item : root.named_parameters()) {
    const auto& parameter = item.value();
    if (!parameter.defined() || !parameter.requires_grad() || known.contains(parameter.unsafeGetTensorImpl())) continue;
    throw Error("parameter '" + item.key() +
                "' was registered after fully_shard: it is in no unit, its gradients are not reduced and no optimizer of this library "
                "updates it. Register it before fully_shard (with `ignore` if it is to be outside of all units), call fully_unshard and "
                "fully_shard again, or freeze it: requires_grad_(false)");
  }
}

}  // namespace

std::function<void()> check_of_registrations(const torch::nn::Module& root) {
  const std::weak_ptr<const torch::nn::Module> module = root.weak_from_this();
  if (module.expired()) return {};
  Known known;
  for (const auto& parameter : root.parameters()) known.insert(parameter.unsafeGetTensorImpl());
  return [module, known = std::move(known), last = fingerprint(root)]() mutable {
    const auto living = module.lock();
    if (!living) return;
    const auto now = fingerprint(*living);
    if (now == last) return;
    validate(*living, known);
    last = now;
  };
}

}  // namespace fsdp::api
