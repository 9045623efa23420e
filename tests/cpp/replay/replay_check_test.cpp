#include "fsdp/replay_check.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/text.h"
#include "fsdp/fsdp.h"
#include "replay/damage.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/stack.h"

namespace replay_check_test {

using fsdp::ReplayCheck;
using fsdp::testing::DamagedMessage;
using fsdp::testing::flip_bit;
using fsdp::testing::line;
using fsdp::testing::make_stack;
using fsdp::testing::plane;
using fsdp::testing::run_ranks;
using fsdp::testing::stack_input;
using fsdp::testing::stack_units;

bool is_nightly() { return std::getenv("FSDP_NIGHTLY") != nullptr; }

// Clean steps.

/// With all that a microbatch may depend on and change beside its batch: dropout, buffers that differ from rank to rank and are read, and a
/// module that is used twice.
struct NoisyImpl : torch::nn::Module {
  NoisyImpl()
      : first(register_module("first", torch::nn::Linear(3, 12))),
        twice(register_module("twice", torch::nn::Linear(12, 12))),
        norm(register_module("norm", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(12).affine(false)))),
        dropout(register_module("dropout", torch::nn::Dropout(0.3))),
        last(register_module("last", torch::nn::Linear(12, 2))),
        seen(register_buffer("seen", torch::zeros({1}))) {}
  at::Tensor forward(const at::Tensor& x) {
    auto y = norm(dropout(torch::tanh(twice(torch::tanh(twice(first(x)))))));
    {
      const torch::NoGradGuard no_grad;
      seen.add_(x.to(at::kFloat).abs().sum());
    }
    return last(y) * (1 + seen);
  }
  torch::nn::Linear first;
  torch::nn::Linear twice;
  torch::nn::BatchNorm1d norm;
  torch::nn::Dropout dropout;
  torch::nn::Linear last;
  at::Tensor seen;
};
TORCH_MODULE(Noisy);

struct Strategy {
  std::string name;
  fsdp::FullyShardOptions options;
  bool plane = false;
  bool accumulates = false;  ///< Microbatches without synchronization come before the last one of a step.
};

std::vector<Strategy> strategies() {
  std::vector<Strategy> all;
  all.push_back({.name = "default", .options = {}});
  all.push_back({.name = "accumulation", .options = {}, .accumulates = true});
  all.push_back({.name = "kept", .options = {.reshard_after_forward = false}});
  all.push_back({.name = "bf16", .options = {.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16}}});
  all.push_back({.name = "bf16 on the wire",
                 .options = {.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16, .grad_comm_dtype = at::kBFloat16}},
                 .accumulates = true});
  all.push_back({.name = "no_shard", .options = {.placements = fsdp::Placements::no_shard()}, .accumulates = true});
  all.push_back({.name = "optim", .options = {.placements = fsdp::Placements::optim()}, .accumulates = true});
  all.push_back({.name = "optim_grads", .options = {.placements = fsdp::Placements::optim_grads()}});
  all.push_back({.name = "offload", .options = {.offload = fsdp::Offload::kAll}});
  all.push_back({.name = "hsdp", .options = {}, .plane = true, .accumulates = true});
  all.push_back({.name = "hfsdp", .options = {.outer_placements = fsdp::Placements::optim()}, .plane = true});
  return all;
}

/// Everything that training leaves, of three steps.
std::vector<at::Tensor> trained(const Strategy& strategy, std::optional<std::int64_t> every) {
  torch::manual_seed(7);
  Noisy model;
  auto options = strategy.options;
  options.mesh = strategy.plane ? plane() : line();
  options.units = fsdp::each<torch::nn::Linear>();
  const auto rank = options.mesh.rank();
  auto sharded = fsdp::fully_shard(*model, options);
  fsdp::AdamW optimizer(*model, {.lr = 0.05});
  std::optional<ReplayCheck> check;
  if (every) check.emplace(*model, *every);
  torch::manual_seed(100 + rank);
  const auto dtype = options.mixed_precision ? at::kBFloat16 : at::kFloat;
  const ReplayCheck::Microbatch microbatch = [&](const std::vector<at::Tensor>& batch) {
    model->forward(batch.front()).to(at::kFloat).square().mean().backward();
  };
  const auto one = [&](std::int64_t step) {
    // A part of a larger tensor.
    const std::vector<at::Tensor> batch = {torch::cat({stack_input(step, rank), stack_input(step, rank)}).to(dtype).narrow(0, 1, 4)};
    check ? check->run(microbatch, batch) : microbatch(batch);
  };
  for (std::int64_t step = 0; step < 3; ++step) {
    if (strategy.accumulates) {
      const fsdp::NoSync no_sync(*model);
      one(10 + step);
      one(20 + step);
    }
    one(step);
    optimizer.step();
    optimizer.zero_grad();
    if (check) check->remember_parameters();
  }
  std::vector<at::Tensor> left;
  for (const auto& shard : sharded.parameter_shards()) left.push_back(shard.value.clone());
  for (const auto& buffer : model->buffers()) left.push_back(buffer.clone());
  left.push_back(torch::rand({1}));  // from the generator's state
  return left;
}

TEST(ReplayCheck, FindsNothingInCleanStepsAndChangesNothing) {
  for (const int nproc : {2, 4}) {
    run_ranks(nproc, [&] {
      for (const auto& strategy : strategies()) {
        if (strategy.plane && nproc == 2) continue;
        const auto expected = trained(strategy, std::nullopt);
        for (const std::int64_t every : {1, 2}) {
          const auto found = trained(strategy, every);
          ASSERT_EQ(found.size(), expected.size());
          for (std::size_t i = 0; i < found.size(); ++i) {
            EXPECT_TRUE(torch::equal(found[i], expected[i])) << strategy.name << ", every " << every << ", tensor " << i;
          }
        }
      }
    });
  }
}

TEST(ReplayCheck, SaysNothingInManyCleanSteps) {
  run_ranks(
      2,
      [](int rank) {
        auto model = make_stack();
        fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
        fsdp::AdamW optimizer(*model);
        ReplayCheck check(*model, 1);
        const std::int64_t steps = is_nightly() ? 10'000 : 100;
        for (std::int64_t step = 0; step < steps; ++step) {
          check.run([&](const std::vector<at::Tensor>& batch) { model->forward(batch.front()).square().mean().backward(); },
                    {stack_input(step, rank)});
          optimizer.step();
          optimizer.zero_grad();
          check.remember_parameters();
        }
        EXPECT_EQ(check.checked(), steps);
      },
      std::chrono::seconds(1800));
}

// Damage.

enum class Damage : std::uint8_t { kAtRest, kMain, kWhole, kGather, kGradient, kReduction };
constexpr std::array kDamages = {Damage::kAtRest, Damage::kMain, Damage::kWhole, Damage::kGather, Damage::kGradient, Damage::kReduction};

/// A stack of which one rank damages something once.
class Damaged {
 public:
  explicit Damaged(const fsdp::DeviceMesh& mesh) : rank_(static_cast<int>(mesh.rank())), model_(make_stack()) {
    handle_.emplace(fsdp::fully_shard(*model_, {.mesh = fsdp::testing::damaging(mesh, message_), .units = stack_units()}));
    optimizer_.emplace(*model_);
    check_.emplace(*model_, 1);
    // While the computation comes to block 1, block 0 is still gathered.
    model_->observer = [this](const std::string& event) {
      if (event == "forward blocks.1" && flip_in_forward_) std::exchange(flip_in_forward_, nullptr)();
    };
    for (std::size_t k = 0; k < model_->blocks->size(); ++k) {
      model_->blocks->at<fsdp::testing::StackBlockImpl>(k).down->weight.register_hook([this, k](const at::Tensor& gradient) {
        auto changed = gradient.clone();
        if (gradient_of_ == static_cast<int>(k)) {
          gradient_of_ = -1;
          flip_bit(changed, bit_);
        }
        return changed;
      });
    }
  }

  /// One step, in which rank `damager` does `damage` to block `block`. Returns the error.
  std::string step(std::optional<Damage> damage, int damager, int block, std::uint64_t bit) {
    bit_ = bit;
    auto& unit = *handle_->engine()->units()[1 + static_cast<std::size_t>(block)];
    std::string error;
    if (damage && rank_ == damager) {
      if (*damage == Damage::kAtRest) flip_bit(unit.main.parts.front(), bit);
      if (*damage == Damage::kMain) flip_in_forward_ = [&unit, bit] { flip_bit(unit.main.parts.front(), bit); };
      if (*damage == Damage::kWhole) {
        auto& entered = *handle_->engine()->units()[1];
        flip_in_forward_ = [&entered, bit] { flip_bit(entered.whole.buffer.parts.front(), bit); };
      }
      if (*damage == Damage::kGather) *message_ = {.operation = "all-gather", .unit = unit.name, .bit = bit};
      if (*damage == Damage::kGradient) gradient_of_ = block;
      if (*damage == Damage::kReduction) *message_ = {.operation = "reduce-scatter", .unit = unit.name, .bit = bit};
    }
    try {
      check_->run([&](const std::vector<at::Tensor>& batch) { model_->forward(batch.front()).square().mean().backward(); },
                  {stack_input(step_++, rank_)});
    } catch (const fsdp::Error& found) {
      error = found.what();
    }
    if (error.empty()) optimizer_->step();
    if (rank_ == damager && (damage == Damage::kAtRest || damage == Damage::kMain)) flip_bit(unit.main.parts.front(), bit);
    handle_->main_parameters_changed();
    optimizer_->zero_grad();
    check_->remember_parameters();
    return error;
  }

 private:
  const int rank_;
  std::shared_ptr<DamagedMessage> message_ = std::make_shared<DamagedMessage>();
  fsdp::testing::Stack model_;
  std::optional<fsdp::FSDPModule> handle_;
  std::optional<fsdp::AdamW> optimizer_;
  std::optional<ReplayCheck> check_;
  std::function<void()> flip_in_forward_;
  int gradient_of_ = -1;
  std::uint64_t bit_ = 0;
  std::int64_t step_ = 0;
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string expected_text(Damage damage) {
  switch (damage) {
    case Damage::kAtRest:
      return "are not those that remember_parameters() has seen";
    case Damage::kMain:
      return "main parameters";
    case Damage::kWhole:
      return "have changed in memory while they were in use";
    case Damage::kGather:
      return "gathered parameters";
    case Damage::kGradient:
      return "gradients";
    case Damage::kReduction:
      return "had other bits when they were reduced again";
  }
  return "";
}

/// The error must name the unit, what was damaged, and the rank; of a sum, also those from whom it may have come.
void expect_located(const std::string& error, Damage damage, int nproc, int damager, int block) {
  const auto unit = "unit 'blocks." + std::to_string(damage == Damage::kWhole ? 0 : block) + "'";
  EXPECT_TRUE(contains(error, unit)) << static_cast<int>(damage) << " in " << unit << ": " << error;
  EXPECT_TRUE(contains(error, expected_text(damage))) << error;
  const auto on = " on rank " + std::to_string(damager);
  EXPECT_TRUE(contains(error, on)) << on << ": " << error;
  EXPECT_FALSE(contains(error, "can't be decided")) << error;
  if (damage != Damage::kReduction) return;
  std::vector<std::int64_t> senders;
  for (int rank = 0; rank < nproc; ++rank) {
    if (rank != damager) senders.push_back(rank);
  }
  EXPECT_TRUE(contains(error, on + ": it has summed wrongly, or what " + fsdp::names_of_ranks(senders) + (nproc == 2 ? " has" : " have") +
                                  " sent to it was damaged"))
      << error;
}

/// A bit of its own each time, the same on all ranks.
void expect_found(int nproc, int flips) {
  run_ranks(
      nproc,
      [&] {
        Damaged training(line());
        std::mt19937_64 random(static_cast<std::uint64_t>(nproc));
        for (int flip = 0; flip < flips; ++flip) {
          const auto damage = kDamages[static_cast<std::size_t>(flip) % kDamages.size()];
          const int damager = static_cast<int>(random() % static_cast<std::uint64_t>(nproc));
          const int block = static_cast<int>(random() % 4);
          const auto bit = random();
          ASSERT_EQ(training.step({}, 0, 0, 0), "");
          expect_located(training.step(damage, damager, block, bit), damage, nproc, damager, block);
        }
      },
      std::chrono::seconds(1800));
}

TEST(ReplayCheck, FindsAndLocatesFlippedBitsOn2Ranks) { expect_found(2, is_nightly() ? 500 : 24); }
TEST(ReplayCheck, FindsAndLocatesFlippedBitsOn4Ranks) { expect_found(4, is_nightly() ? 500 : 12); }

// A rank that always computes another gradient.
TEST(ReplayCheck, AThirdRankDecides) {
  for (const int nproc : {2, 3}) {
    run_ranks(nproc, [&](int rank) {
      auto model = make_stack();
      fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
      ReplayCheck check(*model, 1);
      model->blocks->at<fsdp::testing::StackBlockImpl>(2).down->weight.register_hook(
          [&](const at::Tensor& gradient) { return rank == 1 ? gradient * 1.5 : gradient; });
      std::string error;
      try {
        check.run([&](const std::vector<at::Tensor>& batch) { model->forward(batch.front()).square().mean().backward(); },
                  {stack_input(0, rank)});
      } catch (const fsdp::Error& found) {
        error = found.what();
      }
      EXPECT_TRUE(contains(error, "gradients of unit 'blocks.2' from the batch of rank 0")) << error;
      EXPECT_TRUE(contains(error, nproc == 3 ? "are wrong on rank 1" : "differ between ranks 0 and 1; which are right can't be decided"))
          << error;
    });
  }
}

TEST(ReplayCheck, RefusesWhatItCantCheck) {
  run_ranks(2, [] {
    auto model = make_stack();
    EXPECT_THROW(ReplayCheck(*model, 1), fsdp::Error);
    fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    EXPECT_THROW(ReplayCheck(*model, 0), fsdp::Error);
  });
}

TEST(ReplayCheck, BuffersOfOtherSizesAreAnErrorOnAllRanks) {
  run_ranks(3, [](int rank) {
    auto model = make_stack();
    model->register_buffer("of_this_rank", at::zeros({rank == 0 ? 3 : 5}));
    fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    ReplayCheck check(*model, 1);
    const auto text = fsdp::testing::message_of([&] {
      check.run([&](const std::vector<at::Tensor>& batch) { model->forward(batch.front()).square().mean().backward(); },
                {stack_input(0, rank)});
    });
    EXPECT_TRUE(fsdp::testing::has(text, "another rank's buffers have other sizes than this rank's")) << text;
  });
}

// An exception of the program goes through, and training goes on: with the gradients of an accumulation, if it was in another rank's batch.
TEST(ReplayCheck, AnExceptionInAMicrobatchLeavesTheModelUsable) {
  run_ranks(2, [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    ReplayCheck check(*model, 1);
    int calls = 0;
    int fails_at = 1;
    const ReplayCheck::Microbatch microbatch = [&](const std::vector<at::Tensor>& batch) {
      const auto loss = model->forward(batch.front()).square().mean();
      if (++calls == fails_at) throw std::runtime_error("the program's own");
      loss.backward();
    };
    EXPECT_THROW(check.run(microbatch, {stack_input(0, rank)}), std::runtime_error);
    sharded.reset();
    fails_at = 3;
    EXPECT_THROW(check.run(microbatch, {stack_input(0, rank)}), std::runtime_error);
    sharded.reset();
    check.run(microbatch, {stack_input(0, rank)});
    EXPECT_EQ(check.checked(), 3);
  });
}

}  // namespace replay_check_test
