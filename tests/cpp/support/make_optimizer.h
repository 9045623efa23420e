#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>

#include "fsdp/fsdp.h"

namespace fsdp::testing {

using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(torch::nn::Module&)>;

/// For tests that do the same with several optimizers.
template <typename Optimizer, typename Options>
MakeOptimizer make(Options options) {
  return [options](torch::nn::Module& module) { return std::make_unique<Optimizer>(module, options); };
}

inline MakeOptimizer adamw() { return make<AdamW>(AdamWOptions{.lr = 1e-2}); }

}  // namespace fsdp::testing
