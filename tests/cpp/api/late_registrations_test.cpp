// Parameters that are registered when the model is sharded already.

#include "api/late_registrations.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace late_registrations_test {

using testing::batch;
using testing::each_linear;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;

void step(Net& net, Optimizer& optimizer, int rank) {
  net.forward(batch(rank)).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
}

TEST(Registrations, AfterFullyShardAreAnError) {
  testing::run_ranks(2, [](int rank) {
    const auto model = make_net();
    fully_shard(*model, {.mesh = line(), .units = each_linear()});
    AdamW optimizer(*model, {.lr = 0.1});
    step(*model, optimizer, rank);
    model->second->register_module("adapter", torch::nn::Linear(2, 2));
    for (int pass = 0; pass < 2; ++pass) {
      const auto message = message_of([&] { step(*model, optimizer, rank); });
      EXPECT_TRUE(has(message, "'second.adapter.weight'") && has(message, "registered after fully_shard")) << message;
    }
    model->second->unregister_module("adapter");
    step(*model, optimizer, rank);
    model->register_parameter("scale", at::ones({1}));
    EXPECT_TRUE(has(message_of([&] { step(*model, optimizer, rank); }), "'scale'"));

    fully_unshard(*model);
    fully_shard(*model, {.mesh = line(), .units = each_linear()});
    AdamW other(*model, {.lr = 0.1});
    step(*model, other, rank);
  });
}

TEST(Registrations, ThatNeedNoGradientAreFine) {
  testing::run_ranks(2, [](int rank) {
    const auto model = make_net();
    model->register_parameter("outside", at::ones({1}));
    fully_shard(*model, {.mesh = line(), .units = each_linear(), .ignore = [](const std::string& name, const at::Tensor&) {
                           return name == "outside";
                         }});
    AdamW optimizer(*model, {.lr = 0.1});
    step(*model, optimizer, rank);
    model->register_parameter("table", at::ones({1}), /*requires_grad=*/false);
    model->register_module("activation", torch::nn::Tanh());
    for (int pass = 0; pass < 2; ++pass) step(*model, optimizer, rank);
    const SummonFullParams whole(*model->first);
    model->register_module("dropout", torch::nn::Dropout());
    model->second(at::ones({1, 10}));
  });
}

}  // namespace late_registrations_test
}  // namespace fsdp
