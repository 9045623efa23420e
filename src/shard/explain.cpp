#include "engine/engine.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/memory_budget.h"

namespace fsdp {

std::string explain(const torch::nn::Module& module) {
  const auto text = handle(module).engine()->options().explanation;
  return text.empty() ? "no memory_budget: all options are as they were given\n" : text;
}

}  // namespace fsdp
