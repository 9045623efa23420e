#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>

#include "fsdp/fsdp.h"
#include "support/make_optimizer.h"
#include "support/stack.h"

namespace fsdp::testing {

/// A sharded model that trains, with an optimizer and a buffer. Equal seeds give equal ones.
struct Training {
  explicit Training(FullyShardOptions options = {}, const MakeOptimizer& make_optimizer = adamw(), std::uint64_t seed = 11,
                    StackOptions stack = {})
      : model(nullptr) {
    torch::manual_seed(seed);
    model = Stack(std::move(stack));
    model->register_buffer("counts", torch::randn({3, 2}));
    if (!options.mesh.defined()) options.mesh = line();
    if (!options.units) options.units = stack_units();
    mesh = options.mesh;
    handle = std::make_unique<FSDPModule>(fully_shard(*model, std::move(options)));
    optimizer = make_optimizer(*model);
  }

  /// The steps from `from` to before `to`, each with this rank's input of it.
  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      stack_loss(model, step, static_cast<int>(mesh.rank())).backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  }

  DeviceMesh mesh;
  Stack model;
  std::unique_ptr<FSDPModule> handle;
  std::unique_ptr<Optimizer> optimizer;
};

}  // namespace fsdp::testing
