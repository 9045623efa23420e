// Memory budgets: what is chosen fits in a run, a smaller budget takes no more memory, and one that is too small says what would help.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "gpt.h"
#include "plan/planned_model.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/stack.h"

namespace budget_test {

using fsdp::FullyShardOptions;
using fsdp::MemoryBudget;
using fsdp::Offload;
using fsdp::Placements;
using fsdp::planned_device_mesh;
using fsdp::planning::PlannedModel;
using fsdp::testing::line;
using fsdp::testing::make_stack;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;
using fsdp::testing::StackOptions;

constexpr int kSteps = 7;  // From the sixth on, steps are alike; the first ones may need more.

/// A model and its loss.
struct Trainee {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(int step)> loss;
};

struct Model {
  std::string name;
  std::function<Trainee(int rank)> make;
  FullyShardOptions options;
  bool has_outer = false;
};

Trainee make_gpt(std::int64_t layers, bool tied) {
  torch::manual_seed(5);
  GPT model(GPTConfig{.vocab = 61, .dim = 20, .layers = layers, .heads = 2, .hidden = 37, .context = 8, .tied = tied});
  return {.module = model.ptr(), .loss = [model](int) mutable {
            const auto tokens = at::arange(16).view({2, 8});
            return model->loss(tokens, tokens + 1);
          }};
}

Trainee make_stack_of(StackOptions options, int rank) {
  auto model = make_stack(std::move(options));
  return {.module = model.ptr(), .loss = [model, rank](int step) mutable { return stack_loss(model, step, rank); }};
}

std::vector<Model> models() {
  const fsdp::MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16, .grad_comm_dtype = at::kBFloat16};
  const StackOptions many{.hidden = {30, 5, 60, 18, 9, 44, 25, 12}};
  const StackOptions nested{.hidden = {13, 7, 22}, .nested = true};
  const auto blocks = fsdp::each<GPTBlock>();
  return {{"gpt", [](int) { return make_gpt(6, false); }, {.units = blocks}},
          {"tied gpt in bf16", [](int) { return make_gpt(4, true); }, {.units = blocks, .mixed_precision = bf16}},
          {"stack", [=](int rank) { return make_stack_of(many, rank); }, {.units = stack_units()}},
          {"nested stack", [=](int rank) { return make_stack_of(nested, rank); }, {.units = stack_units()}},
          {"hsdp", [=](int rank) { return make_stack_of(many, rank); }, {.units = stack_units()}, true},
          {"hfsdp", [](int) { return make_gpt(4, false); }, {.units = blocks, .outer_placements = Placements::optim()}, true}};
}

fsdp::DeviceMesh mesh_of(const Model& model, int ranks) {
  if (!model.has_outer) return line();
  return fsdp::init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", ranks / 2}});
}

fsdp::DeviceMesh planned_mesh_of(const Model& model, int ranks) {
  if (!model.has_outer) return planned_device_mesh("cpu", {{"dp_shard", ranks}});
  return planned_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", ranks / 2}});
}

struct Outcome {
  std::int64_t peak = 0;        // of all steps
  std::int64_t most = 0;        // what the choice says that a step needs, with unused slots
  std::int64_t all_gather = 0;  // bytes of the last step
  std::string explanation;
  std::vector<at::Tensor> parameters;
};

Outcome train(const Model& model, int rank, FullyShardOptions options) {
  const auto [module, loss] = model.make(rank);
  auto sharded = fsdp::fully_shard(*module, std::move(options));
  fsdp::AdamW optimizer(*module, {.lr = 1e-2});
  for (int step = 0; step < kSteps; ++step) {
    sharded.reset_wire_stats();
    loss(step).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  const auto memory = sharded.memory_stats();
  Outcome outcome{.peak = memory.total.peak,
                  .most = 0,
                  .all_gather = sharded.wire_stats().all_gather_bytes,
                  .explanation = fsdp::explain(*module),
                  .parameters = {}};
  const std::string says = "a step needs at most ";
  const auto found = outcome.explanation.find(says);
  if (found != std::string::npos) outcome.most = std::stoll(outcome.explanation.substr(found + says.size()));
  for (const auto& [name, value] : sharded.full_parameters()) outcome.parameters.push_back(value);
  return outcome;
}

/// What plans with these options need in any step.
std::int64_t most_of(const torch::nn::Module& module, const FullyShardOptions& options) {
  const PlannedModel model(module, options, {});
  return model.observe(model.given()).most;
}

/// The bytes that a budget needs at least, and those with which everything stays gathered.
std::pair<std::int64_t, std::int64_t> range_of(const Model& model, int ranks) {
  auto options = model.options;
  options.mesh = planned_mesh_of(model, ranks);
  const auto module = model.make(0).module;
  options.reshard_after_forward = false;
  const auto most = most_of(*module, options);
  options.reshard_after_forward = true;
  options.prefetch_depth = 0;
  options.offload = Offload::kOptimizerState;
  return {most_of(*module, options), most};
}

void expect_within_budgets(int ranks, int budgets) {
  run_ranks(ranks, [ranks, budgets](int rank) {
    for (const auto& model : models()) {
      if (model.has_outer && ranks < 4) continue;
      SCOPED_TRACE(model.name);
      auto options = model.options;
      options.mesh = mesh_of(model, ranks);
      const auto without = train(model, rank, options);
      EXPECT_EQ(without.explanation, "no memory_budget: all options are as they were given\n");
      const auto [least, most] = range_of(model, ranks);
      Outcome smaller;
      for (int k = 0; k < budgets; ++k) {
        const auto bytes = least + (most - least) * k / (budgets - 1);
        SCOPED_TRACE(testing::Message() << bytes << " bytes of " << least << " to " << most);
        options.memory_budget = MemoryBudget{.bytes = bytes};
        const auto outcome = train(model, rank, options);
        EXPECT_LE(outcome.peak, outcome.most) << outcome.explanation;
        EXPECT_LE(outcome.most, bytes) << outcome.explanation;
        EXPECT_GE(outcome.most, smaller.most) << smaller.explanation << outcome.explanation;
        for (std::size_t i = 0; i < without.parameters.size(); ++i) EXPECT_TRUE(at::equal(outcome.parameters[i], without.parameters[i]));
        smaller = outcome;
      }
      EXPECT_LT(smaller.all_gather, without.all_gather);
    }
  });
}

TEST(Budget, IsKeptByTwoRanks) { expect_within_budgets(2, 5); }
TEST(Budget, IsKeptByFourRanks) { expect_within_budgets(4, 3); }

/// What plans need in any step: with these options, and everything else as it is for a stack on two ranks.
std::int64_t planned(FullyShardOptions options) {
  options.mesh = planned_device_mesh("cpu", {{"dp_shard", 2}});
  options.units = stack_units();
  return most_of(*make_stack(), options);
}

std::vector<std::string> kept_of(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& unit : fsdp::handle(module).engine()->units()) {
    if (unit->options.kept_by_budget) names.push_back(unit->name);
  }
  return names;
}

TEST(Budget, GivesUpPrefetchBeforeItOffloads) {
  run_ranks(2, [](int) {
    const auto depth_1 = planned({});
    const auto depth_0 = planned({.prefetch_depth = 0});
    ASSERT_LT(depth_0, depth_1);
    const auto explained = [&](std::int64_t bytes) {
      auto model = make_stack();
      fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .memory_budget = MemoryBudget{.bytes = bytes}});
      return fsdp::explain(*model);
    };
    const auto has = [](const std::string& text, const std::string& part) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
    };
    has(explained(1 << 30), "prefetch_depth: 1, as given");
    has(explained(1 << 30), "optimizer state: on the device");
    has(explained(depth_1 - 1), "prefetch_depth: 0, because prefetch_depth 1 needs " + std::to_string(depth_1) + " bytes");
    has(explained(depth_1 - 1), "optimizer state: on the device");
    has(explained(depth_0 - 1), "optimizer state: offloaded, because without it prefetch_depth 0 needs " + std::to_string(depth_0));
  });
}

TEST(Budget, KeepsAllThatIsGatheredTwiceIfThereIsRoom) {
  run_ranks(2, [](int) {
    auto model = make_stack();
    fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .memory_budget = MemoryBudget{.bytes = 1 << 30}});
    // The root stays anyway, and the last block from forward to backward.
    EXPECT_EQ(kept_of(*model), (std::vector<std::string>{"blocks.0", "blocks.1", "blocks.2"}));
  });
}

TEST(Budget, CountsActivationsAndTheOptimizerAsGiven) {
  run_ranks(2, [](int) {
    const auto explained = [](std::int64_t bytes, fsdp::PlanOptions assumed) {
      auto model = make_stack();
      fsdp::fully_shard(
          *model, {.mesh = line(), .units = stack_units(), .memory_budget = MemoryBudget{.bytes = bytes, .planned = std::move(assumed)}});
      return fsdp::explain(*model);
    };
    const std::int64_t activations = 1 << 20;
    EXPECT_THROW(explained(activations, {.activations = {{"blocks.1", activations}}}), fsdp::Error);
    explained(activations + planned({.reshard_after_forward = false}), {.activations = {{"blocks.1", activations}}});
    const auto bytes = planned({}) - 1;
    EXPECT_NE(explained(bytes, {}).find("prefetch_depth: 0"), std::string::npos);
    EXPECT_NE(explained(bytes, {.optimizer = fsdp::PlannedOptimizer::kNone}).find("prefetch_depth: 1"), std::string::npos);
  });
}

/// This rank's part of a layer's hidden units: the first matrix is cut by rows, and the second by columns.
struct PieceImpl : torch::nn::Module {
  explicit PieceImpl(std::int64_t hidden) {
    up = register_parameter("up", torch::randn({hidden, 11}));
    down = register_parameter("down", torch::randn({11, hidden}));
    bias = register_parameter("bias", torch::randn({11}));
  }
  at::Tensor forward(const at::Tensor& x) { return x + at::linear(at::tanh(at::linear(x, up)), down, bias); }
  at::Tensor up, down, bias;
};
TORCH_MODULE(Piece);

TEST(Budget, IsThatOfTheRankWithTheLargestPieces) {
  run_ranks(4, [](int rank) {
    const auto grid = fsdp::init_device_mesh("cpu", {{"dp_shard", 2}, {"tp", 2}});
    const auto tp = grid["tp"];
    const auto make = [&](std::optional<std::int64_t> bytes) {
      torch::manual_seed(rank);
      const std::int64_t hidden = tp.coordinate("tp") == 0 ? 30 : 17;
      torch::nn::Sequential model{Piece(hidden), Piece(hidden), Piece(hidden), Piece(hidden)};
      FullyShardOptions options{.mesh = grid["dp_shard"],
                                .units = fsdp::each<Piece>(),
                                .tensor_parallel = [tp](const std::string& name, const at::Tensor&) -> std::optional<fsdp::TensorParallel> {
                                  if (name.ends_with("bias")) return std::nullopt;
                                  return fsdp::TensorParallel{.mesh = tp, .dim = name.ends_with("down") ? 1 : 0};
                                }};
      if (bytes) options.memory_budget = MemoryBudget{.bytes = *bytes};
      fsdp::fully_shard(*model, options);
      return model;
    };
    const auto least_message = message_of([&] { make(1); });
    EXPECT_NE(least_message.find("too small by "), std::string::npos) << least_message;
    const std::int64_t least = 1 + std::stoll(least_message.substr(least_message.find("too small by ") + 13));
    const auto same_on_all = [&](double value) { EXPECT_EQ(grid.sum(value), 4 * value); };
    same_on_all(static_cast<double>(least));
    std::size_t most_kept = 0;
    for (const std::int64_t bytes : {least, least + 6'000, std::int64_t{1} << 30}) {
      auto model = make(bytes);
      const auto kept = kept_of(*model);
      same_on_all(static_cast<double>(kept.size()));
      EXPECT_GE(kept.size(), most_kept) << fsdp::explain(*model);
      most_kept = kept.size();
      fsdp::AdamW optimizer(*model, {.lr = 1e-2});
      for (int step = 0; step < kSteps; ++step) {
        model->forward(at::ones({2, 11})).sum().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      EXPECT_LE(fsdp::handle(*model).memory_stats().total.peak, bytes) << fsdp::explain(*model);
    }
    EXPECT_GT(most_kept, 0U);
  });
}

TEST(Budget, ThatIsTooSmallNamesWhatHelpsWithoutReadAhead) {
  run_ranks(2, [](int) {
    // With all units kept, read-ahead makes no difference; resharded ones fit without it.
    const auto kept = planned({.reshard_after_forward = false, .prefetch_depth = 0, .offload = Offload::kOptimizerState});
    const auto resharded = planned({.prefetch_depth = 0, .offload = Offload::kOptimizerState});
    ASSERT_LT(resharded, kept);
    ASSERT_GT(planned({.offload = Offload::kOptimizerState}), resharded);
    auto model = make_stack();
    const auto message = message_of([&] {
      fsdp::fully_shard(
          *model,
          {.mesh = line(), .units = stack_units(), .reshard_after_forward = false, .memory_budget = MemoryBudget{.bytes = resharded}});
    });
    EXPECT_NE(message.find("it fits with reshard_after_forward = true, which needs " + std::to_string(resharded)), std::string::npos)
        << message;
  });
}

TEST(Budget, ThatIsTooSmallSaysByHowMuchAndWhatHelps) {
  run_ranks(2, [](int rank) {
    const auto fails_with = [](std::int64_t bytes, const std::string& part, FullyShardOptions options = {}) {
      auto model = make_stack();
      options.mesh = line();
      options.units = stack_units();
      options.memory_budget = MemoryBudget{.bytes = bytes};
      const auto message = message_of([&] { fsdp::fully_shard(*model, options); });
      EXPECT_NE(message.find(part), std::string::npos) << part << " is not in\n" << message;
      options.memory_budget.reset();
      fsdp::fully_shard(*model, options);  // It was left as it was.
    };
    const auto least = planned({.prefetch_depth = 0, .offload = Offload::kOptimizerState});
    fails_with(least - 10, "too small by 10 bytes: even with prefetch_depth 0 and offload = Offload::kOptimizerState and no unit kept");
    fails_with(least - 10, "it fits with mixed_precision with param_dtype at::kBFloat16, which needs ");
    fails_with(1, "helps most, but needs ");
    fails_with(0, "memory_budget 0 bytes; give how many");
    fails_with(1 << 30, "keep_gathered_bytes 5 sets it by hand; give one of them", {.keep_gathered_bytes = 5});
    auto model = make_stack();
    const auto message = message_of([&] {
      fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .memory_budget = MemoryBudget{.bytes = (1 << 30) + rank}});
    });
    EXPECT_NE(message.find("memory_budget"), std::string::npos) << message;
  });
}

}  // namespace budget_test
