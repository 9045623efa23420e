#include "fsdp/tie_parameters.h"

#include <algorithm>
#include <string>

#include "base/text.h"
#include "fsdp/error.h"
#include "paging/paged_storage.h"

namespace fsdp {
namespace {

/// Gives access to the parameters, because Module has no method that replaces one.
struct Open : torch::nn::Module {
  static auto& parameters_of(torch::nn::Module& module) { return module.*(&Open::parameters_); }
};

}  // namespace

void tie_parameters(torch::nn::Module& module, at::Tensor& parameter, const at::Tensor& target) {
  const auto fail = [&](const std::string& what) { throw Error("tie_parameters: " + what); };
  if (!parameter.defined() || !target.defined()) fail("the parameter or its target is undefined");
  auto& registered = Open::parameters_of(module);
  const auto is_it = [&](const auto& item) { return item.value().is_same(parameter); };
  if (std::none_of(registered.begin(), registered.end(), is_it)) {
    fail("module '" + module.name() + "' does not register the parameter of shape " + in_brackets(parameter.sizes()) +
         "; pass the module whose member it is, not one around it");
  }
  if (parameter.sizes() != target.sizes() || parameter.scalar_type() != target.scalar_type() || parameter.device() != target.device()) {
    fail("a parameter of shape " + in_brackets(parameter.sizes()) + ", " + c10::toString(parameter.scalar_type()) + " on " +
         parameter.device().str() + " and one of shape " + in_brackets(target.sizes()) + ", " + c10::toString(target.scalar_type()) +
         " on " + target.device().str() + " can't be one tensor");
  }
  if (paging::PagedStorage::of(parameter) != nullptr || paging::PagedStorage::of(target) != nullptr) {
    fail("a parameter is sharded already; tie before fully_shard");
  }
  for (auto& item : registered) {
    if (is_it(item)) item.value() = target;
  }
  parameter = target;
}

}  // namespace fsdp
