// One backward of a sharded model is one for its engine, whatever backwards run inside of it.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/recording_communicator.h"
#include "support/twins.h"

namespace fsdp {
namespace checkpoint_backward_test {

using testing::batch;
using testing::each_linear;
using testing::expect_same;
using testing::line;
using testing::Log;
using testing::make_net;
using testing::NamedTensors;
using testing::Net;

/// How often the ranks have told each other which gradients they had: once at the end of each backward.
std::size_t ends(const Log& log) { return static_cast<std::size_t>(std::count(log.begin(), log.end(), "exchange")); }

at::Tensor loss_of(Net& net, const at::Tensor& x) { return net.forward(x).square().mean(); }

// The engine hears nothing between the end of forward and the repetition, whose units are present.
TEST(CheckpointBackward, EndsOnceWithNothingAfterIt) {
  testing::run_ranks(2, [](int rank) {
    for (const bool reshard : {true, false}) {
      NamedTensors expected;
      for (const bool checkpoints : {false, true}) {
        const auto log = std::make_shared<Log>();
        const auto model = make_net();
        auto sharded =
            fully_shard(*model, {.mesh = testing::recorded(line(), log), .units = each_linear(), .reshard_after_forward = reshard});
        for (int pass = 0; pass < 3; ++pass) {
          sharded.zero_grad();
          const auto x = at::tanh(model->first(batch(rank)));
          const auto rest = [&](const at::Tensor& y) { return model->third(model->second(y)).square().mean(); };
          auto loss = checkpoints ? activation_checkpoint(rest, x) : rest(x);
          log->clear();
          loss.backward();
          EXPECT_EQ(ends(*log), 1U) << reshard << ", pass " << pass;
          for (const auto* unit : {"first", "second", "third"}) {
            EXPECT_EQ(std::count(log->begin(), log->end(), std::string("reduce ") + unit), 1) << reshard << ", " << unit;
          }
        }
        if (checkpoints) expect_same(sharded.full_gradients(), expected, 0, "gradients");
        expected = sharded.full_gradients();
      }
    }
  });
}

TEST(CheckpointBackward, EndsOnceWithNestedOnes) {
  testing::run_ranks(2, [](int rank) {
    const auto log = std::make_shared<Log>();
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = testing::recorded(line(), log), .units = each_linear()});
    for (int pass = 0; pass < 2; ++pass) {
      auto loss = activation_checkpoint(
          [&](const at::Tensor& x) {
            return activation_checkpoint([&](const at::Tensor& y) { return model->third(model->second(y)).square().mean(); },
                                         at::tanh(model->first(x)));
          },
          batch(rank));
      log->clear();
      loss.backward();
      EXPECT_EQ(ends(*log), 1U);
    }
  });
}

/// The identity, but its backward first runs one of its own.
struct BackwardWithin : torch::autograd::Function<BackwardWithin> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::function<void()>* within) {
    context->saved_data["within"] = reinterpret_cast<std::int64_t>(within);
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const at::AutoGradMode with_grad(true);
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["within"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};

/// What a backward within a backward must leave: the gradients of both, and one end.
TEST(CheckpointBackward, AnotherWithinIt) {
  testing::run_ranks(2, [](int rank) {
    for (const bool checkpoints : {false, true}) {
      const auto log = std::make_shared<Log>();
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = testing::recorded(line(), log), .units = each_linear()});
      const auto whole = [&](const at::Tensor& x) { return loss_of(*model, x); };
      const auto run = [&](const at::Tensor& x) { return checkpoints ? activation_checkpoint(whole, x) : whole(x); };
      NamedTensors expected;
      run(batch(rank)).backward();
      run(batch(rank + 10)).backward();
      expected = sharded.full_gradients();
      for (int pass = 0; pass < 2; ++pass) {
        sharded.zero_grad();
        std::function<void()> within = [&] { run(batch(rank + 10)).backward(); };
        auto loss = BackwardWithin::apply(run(batch(rank)), &within);
        log->clear();
        loss.backward();
        EXPECT_EQ(ends(*log), 1U) << checkpoints;
        expect_same(sharded.full_gradients(), expected, 1e-6, "gradients");
      }
    }
  });
}

// The engine hears first of the inner one: all that comes before it is in use from forward on.
TEST(CheckpointBackward, AnotherWithinItOfWhatIsPresent) {
  testing::run_ranks(2, [](int rank) {
    for (const bool checkpoints : {false, true}) {
      const auto log = std::make_shared<Log>();
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = testing::recorded(line(), log), .units = each_linear()});
      const auto last = [&](const at::Tensor& x) { return model->third(x).sum(); };
      std::function<void()> within = [&] {
        const auto x = at::ones({2, 10});
        (checkpoints ? activation_checkpoint(last, x) : last(x)).backward();
      };
      for (int pass = 0; pass < 2; ++pass) {
        auto loss = BackwardWithin::apply(loss_of(*model, batch(rank)), &within);
        log->clear();
        loss.backward();
        EXPECT_EQ(ends(*log), 1U) << checkpoints;
      }
    }
  });
}

// An inner backward that throws, and is caught, ends nothing but itself: what it delivered before counts, as in torch.
TEST(CheckpointBackward, OneWithinItThatThrows) {
  testing::run_ranks(2, [](int rank) {
    for (const bool checkpoints : {false, true}) {
      const auto run = [&](Net& net) {
        const auto tail = [&](const at::Tensor& y) { return net.third(net.second(y)).square().mean(); };
        std::function<void()> within = [&] {
          auto h = at::tanh(net.first(batch(rank + 10)));
          h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of luck"); });
          auto failing = checkpoints ? activation_checkpoint(tail, h) : tail(h);
          EXPECT_THROW(failing.backward(), std::runtime_error);
        };
        auto x = at::tanh(net.first(batch(rank)));
        auto loss = BackwardWithin::apply(checkpoints ? activation_checkpoint(tail, x) : tail(x), &within);
        loss.backward();
      };
      const auto log = std::make_shared<Log>();
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = testing::recorded(line(), log), .units = each_linear()});
      const auto plain = make_net();
      run(*plain);
      for (int pass = 0; pass < 2; ++pass) {
        sharded.zero_grad();
        log->clear();
        run(*model);
        EXPECT_EQ(ends(*log), 1U) << checkpoints;
        // The plain model's are of this rank alone.
        const auto gradients = sharded.full_gradients();
        for (const auto& [name, value] : gradients) EXPECT_TRUE(value.defined()) << name;
        for (const auto& [name, value] : gradients) {
          auto sum = plain->named_parameters()[name].grad().clone();
          const auto all = line().communicator("dp_shard")->exchange(sum, {.operation = "test", .unit = "test"});
          EXPECT_TRUE(torch::allclose(value, all.view({2, -1}).mean(0).view(value.sizes()), 1e-5, 1e-5)) << name;
        }
      }
    }
  });
}

}  // namespace checkpoint_backward_test
}  // namespace fsdp
