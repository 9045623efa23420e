// Loss scaling: torch's rules for the scale, and one decision for all ranks.

#include "fsdp/grad_scaler.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace grad_scaler_test {

using testing::batch;
using testing::each_linear;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;
using testing::over_ranks;

constexpr double kInf = std::numeric_limits<double>::infinity();

at::Tensor loss_of(Net& net, int rank) { return net.forward(batch(rank)).square().mean(); }

/// Sharded with each strategy.
void with_every_strategy(const std::function<void(Net& net, FSDPModule& sharded, const std::string& strategy)>& fn) {
  for (const auto& strategy : testing::all_strategies()) {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
    fn(*model, sharded, strategy);
  }
}

// A power of two changes no bits, as long as nothing overflows.
TEST(GradScaler, StepsAsWithout) {
  over_ranks([](int rank) {
    with_every_strategy([&](Net& net, FSDPModule& sharded, const std::string& strategy) {
      AdamW optimizer(net, {.lr = 0.05});
      GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
      const auto plain = make_net();
      auto plain_sharded = fully_shard(*plain, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
      AdamW plain_optimizer(*plain, {.lr = 0.05});
      for (int step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        plain_optimizer.zero_grad();
        scaler.scale(loss_of(net, rank)).backward();
        loss_of(*plain, rank).backward();
        if (step % 2 == 0) {
          scaler.unscale_(net);
          expect_same(sharded.full_gradients(), plain_sharded.full_gradients(), 0, strategy + ", unscaled");
          EXPECT_EQ(clip_grad_norm(net, 0.1), clip_grad_norm(*plain, 0.1));
        }
        EXPECT_TRUE(scaler.step(optimizer));
        plain_optimizer.step();
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 1024 * std::pow(2, (step + 1) / 2));
        expect_same(sharded.full_parameters(), plain_sharded.full_parameters(), 0, strategy);
      }
    });
  });
}

TEST(GradScaler, OneInfiniteElementOnOneRankStopsAll) {
  over_ranks([](int rank) {
    const int ranks = static_cast<int>(line().size());
    for (const double bad : {-kInf, std::nan("")}) {
      with_every_strategy([&](Net& net, FSDPModule& sharded, const std::string& strategy) {
        AdamW optimizer(net, {.lr = 0.05});
        GradScaler scaler({.init_scale = 8});
        // Both of what ranks compute and of where it lands: each rank adds it in turn, at elements that different ranks own.
        for (int source = 0; source < ranks; ++source) {
          for (const std::int64_t element : {0, 99}) {
            optimizer.zero_grad();
            scaler.scale(loss_of(net, rank)).backward();
            if (source == 0) {
              EXPECT_TRUE(scaler.step(optimizer));
            }  // Gives the optimizer a state that must stay.
            if (source == 0) scaler.update();

            optimizer.zero_grad();
            // On every rank: all must touch the same units.
            (scaler.scale(loss_of(net, rank)) + (rank == source ? bad : 0.0) * net.second->weight.flatten()[element]).backward();
            const auto gradients = sharded.full_gradients();
            const auto before = sharded.full_parameters();
            const double scale = scaler.get_scale();
            if (element == 99) scaler.unscale_(net);
            EXPECT_FALSE(scaler.step(optimizer)) << strategy;
            expect_same(sharded.full_parameters(), before, 0, strategy);
            for (std::size_t i = 0; i < gradients.size(); ++i) {
              EXPECT_TRUE(at::allclose(sharded.full_gradients()[i].second, gradients[i].second, 0, 0, /*equal_nan=*/true)) << strategy;
            }
            scaler.update();
            EXPECT_EQ(scaler.get_scale(), scale / 2);
            EXPECT_EQ(scaler.state_dict().growth_tracker, 0);
          }
        }
      });
    }
  });
}

// A gradient that has overflowed in half precision, and not by hand.
TEST(GradScaler, FindsTheScaleForHalfPrecision) {
  over_ranks([](int rank) {
    for (const auto& strategy : testing::all_strategies()) {
      torch::manual_seed(1);
      torch::nn::Linear model(8, 8);
      model->to(at::kHalf);
      const auto sharded = fully_shard(*model, {.mesh = line(), .placements = Placements::from_name(strategy)});
      SGD optimizer(*model, {.lr = 0.1});
      GradScaler scaler({.init_scale = std::pow(2, 24)});
      const auto x = testing::normal({4, 8}, static_cast<std::uint64_t>(rank)).to(at::kHalf);
      int skipped = 0;
      for (int step = 0; step < 20; ++step) {
        optimizer.zero_grad();
        const auto loss = scaler.scale(model(x).square().mean());
        EXPECT_EQ(loss.scalar_type(), at::kFloat);  // As torch: the scaled loss itself does not overflow.
        loss.backward();
        skipped += scaler.step(optimizer) ? 0 : 1;
        scaler.update();
      }
      EXPECT_GT(skipped, 3) << strategy;
      EXPECT_LT(skipped, 20) << strategy;
      EXPECT_EQ(scaler.get_scale(), std::pow(2, 24 - skipped));
      for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.isfinite().all().item<bool>());
    }
  });
}

TEST(GradScaler, EveryDtypeAndEveryKindOfInfinity) {
  testing::run_ranks(1, [] {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const double value : {kInf, -kInf, std::nan(""), 0.0, 60000.0, -1e-7}) {
        torch::nn::Module model;
        const auto parameter = model.register_parameter("p", at::zeros({100}, dtype));
        (void)fully_shard(model, {});
        SGD optimizer(model, {.lr = 0.1});
        GradScaler scaler({.init_scale = 1});
        auto gradient = at::ones({100}, dtype);
        gradient[93] = value;
        parameter.backward(gradient);
        EXPECT_EQ(scaler.step(optimizer), std::isfinite(value)) << dtype << " " << value;
      }
    }
  });
}

TEST(GradScaler, OneExchangeOfANumber) {
  over_ranks([](int rank) {
    const auto mesh = line();
    with_every_strategy([&](Net& net, FSDPModule& sharded, const std::string& strategy) {
      AdamW optimizer(net);
      GradScaler scaler;
      scaler.scale(loss_of(net, rank)).backward();
      sharded.reset_wire_stats();
      scaler.unscale_(net);
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(sharded.wire_stats().control_bytes, 8 * (mesh.size() - 1)) << strategy;
    });
  });
}

TEST(GradScaler, SeveralModels) {
  over_ranks([](int rank) {
    const auto one = make_net();
    const auto two = make_net();
    auto sharded_one = fully_shard(*one, {.mesh = line(), .units = each_linear()});
    auto sharded_two = fully_shard(*two, {.mesh = line(), .units = each_linear()});
    SGD optimizer_one(*one, {.lr = 0.1});
    SGD optimizer_two(*two, {.lr = 0.1});
    GradScaler scaler({.init_scale = 4});
    scaler.scale(loss_of(*one, rank)).backward();
    (scaler.scale(loss_of(*two, rank)) * kInf).backward();
    const auto before = sharded_two.full_parameters();
    EXPECT_TRUE(scaler.step(optimizer_one));
    EXPECT_FALSE(scaler.step(optimizer_two));
    expect_same(sharded_two.full_parameters(), before, 0, "skipped");
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 2);  // By the worst of them.
  });
}

TEST(GradScaler, DisabledDoesNothing) {
  testing::run_ranks(2, [](int rank) {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    SGD optimizer(*model, {.lr = 0.1});
    GradScaler scaler({.enabled = false});
    EXPECT_FALSE(scaler.is_enabled());
    EXPECT_EQ(scaler.get_scale(), 1);
    const auto loss = loss_of(*model, rank);
    EXPECT_EQ(scaler.scale(loss).unsafeGetTensorImpl(), loss.unsafeGetTensorImpl());
    loss.backward();
    const auto before = sharded.full_parameters();
    sharded.reset_wire_stats();
    scaler.unscale_(*model);
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    scaler.update(3);
    EXPECT_EQ(scaler.get_scale(), 1);
    EXPECT_EQ(sharded.wire_stats().control_bytes, 0);
    EXPECT_FALSE(torch::equal(sharded.full_parameters()[0].second, before[0].second));
  });
}

TEST(GradScaler, StateIsKept) {
  testing::run_ranks(1, [] {
    const auto model = make_net();
    (void)fully_shard(*model, {.units = each_linear()});
    SGD optimizer(*model, {.lr = 0.1});
    const auto iterate = [&](GradScaler& scaler) {
      optimizer.zero_grad();
      scaler.scale(loss_of(*model, 0)).backward();
      scaler.step(optimizer);
      scaler.update();
    };
    GradScaler scaler({.init_scale = 4, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
    iterate(scaler);
    iterate(scaler);
    const GradScalerState expected{.scale = 4, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3, .growth_tracker = 2};
    EXPECT_EQ(scaler.state_dict(), expected);
    GradScaler restored;
    restored.load_state_dict(scaler.state_dict());
    iterate(restored);
    EXPECT_EQ(restored.get_scale(), 16);
    EXPECT_EQ(restored.state_dict().growth_tracker, 0);
    restored.update(7);
    EXPECT_EQ(restored.get_scale(), 7);
    // Never beyond what fp32 can hold.
    restored.load_state_dict({.scale = std::pow(2, 127), .growth_factor = 2, .backoff_factor = 0.5, .growth_interval = 1});
    optimizer.zero_grad();
    (0 * model->first->bias.sum()).backward();
    EXPECT_TRUE(restored.step(optimizer));
    restored.update();
    EXPECT_EQ(restored.get_scale(), std::pow(2, 127));
  });
}

TEST(GradScaler, RefusesWrongOrderAndBadOptions) {
  testing::run_ranks(1, [] {
    const auto model = make_net();
    (void)fully_shard(*model, {.units = each_linear()});
    SGD optimizer(*model, {.lr = 0.1});
    GradScaler scaler;
    EXPECT_TRUE(has(message_of([&] { scaler.update(); }), "call step() before"));
    scaler.scale(loss_of(*model, 0)).backward();
    scaler.unscale_(*model);
    EXPECT_TRUE(has(message_of([&] { scaler.unscale_(*model); }), "is called twice"));
    scaler.step(optimizer);
    EXPECT_TRUE(has(message_of([&] { scaler.unscale_(*model); }), "is called after step()"));
    EXPECT_TRUE(has(message_of([&] { scaler.step(optimizer); }), "is called twice"));
    scaler.update();
    EXPECT_TRUE(scaler.step(optimizer));

    const auto refusal = [](const GradScalerOptions& options) { return message_of([&] { GradScaler bad(options); }); };
    EXPECT_TRUE(has(refusal({.init_scale = 0}), "scale must be positive"));
    EXPECT_TRUE(has(refusal({.init_scale = kInf}), "scale must be positive and finite"));
    EXPECT_TRUE(has(refusal({.growth_factor = 1}), "growth_factor must be greater than 1"));
    EXPECT_TRUE(has(refusal({.backoff_factor = 1}), "backoff_factor must lie between 0 and 1"));
    EXPECT_TRUE(has(refusal({.growth_interval = 0}), "growth_interval must be at least 1"));
    EXPECT_TRUE(has(message_of([&] { scaler.update(-1); }), "scale must be positive"));
    EXPECT_TRUE(has(message_of([&] { scaler.load_state_dict({}); }), "scale must be positive"));
  });
}

}  // namespace grad_scaler_test
}  // namespace fsdp
