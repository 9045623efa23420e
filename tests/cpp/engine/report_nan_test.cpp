// report_nan_in_param_grad: one error on every rank says whose gradient had NaN, where, and when.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>

#include "fsdp/error.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/stack.h"

namespace report_nan_test {

using fsdp::Placements;
using fsdp::testing::has;
using fsdp::testing::make_stack;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::Stack;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

std::string error_of_backward(const at::Tensor& loss) {
  return message_of([&] { loss.backward(); });
}

/// A backward in which the gradient that reaches blocks.1 is `value` on `rank` alone, or `value` on it and minus that on the next one.
at::Tensor poisoned_loss(Stack& model, int rank, int poisoned, double value, bool opposite) {
  double factor = rank == poisoned ? value : 0;
  if (opposite && rank == poisoned + 1) factor = -value;
  // On every rank, so that all touch the same units.
  auto& bias = model->blocks->at<fsdp::testing::StackBlockImpl>(1).down->bias;
  return stack_loss(model, 0, rank) + bias.narrow(0, 0, 1).sum() * factor;
}

TEST(ReportNaN, NamesParameterUnitAndRanks) {
  for (const auto& [ranks, outer] : {std::pair(2, 1), std::pair(4, 1), std::pair(4, 2)}) {
    run_ranks(ranks, [outer = outer](int rank) {
      const auto mesh = outer == 1 ? fsdp::init_device_mesh("cpu", {{"dp_shard", -1}})
                                   : fsdp::init_device_mesh("cpu", {{"dp_outer", outer}, {"dp_shard", -1}});
      for (const auto& placements :
           {Placements::no_shard(), Placements::optim(), Placements::optim_grads(), Placements::optim_grads_params()}) {
        auto model = make_stack();
        auto sharded =
            fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .placements = placements, .report_nan_in_param_grad = true});
        EXPECT_EQ(error_of_backward(stack_loss(model, 0, rank)), "no error");
        sharded.zero_grad();
        const auto nan = std::numeric_limits<double>::quiet_NaN();
        auto error = error_of_backward(poisoned_loss(model, rank, 1, nan, false));
        EXPECT_TRUE(has(error, "parameter 'blocks.1.down.bias' of unit 'blocks.1' before reduction, on rank 1\n")) << error;
        EXPECT_TRUE(has(error, "parameter 'blocks.1.down.bias' of unit 'blocks.1' after reduction")) << error;
        EXPECT_FALSE(has(error, "blocks.2") || has(error, "down.weight")) << error;
        sharded.zero_grad();
        // Infinities of opposite sign: NaN only in their sum.
        error = error_of_backward(poisoned_loss(model, rank, 0, std::numeric_limits<double>::infinity(), true));
        EXPECT_FALSE(has(error, "before reduction, on")) << error;
        EXPECT_TRUE(has(error, "parameter 'blocks.1.down.bias' of unit 'blocks.1' after reduction")) << error;
        sharded.zero_grad();
        // Nothing is left of it.
        EXPECT_EQ(error_of_backward(stack_loss(model, 1, rank)), "no error");
      }
    });
  }
}

TEST(ReportNaN, OffByDefault) {
  run_ranks(2, [](int rank) {
    auto model = make_stack();
    fsdp::fully_shard(*model, {.mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}), .units = stack_units()});
    EXPECT_EQ(error_of_backward(poisoned_loss(model, rank, 1, std::numeric_limits<double>::quiet_NaN(), false)), "no error");
  });
}

}  // namespace report_nan_test
