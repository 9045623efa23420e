// What building and sharding a model without memory takes, in bytes.

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "gpt.h"
#include "support/twins.h"

namespace fsdp {
namespace deferred_memory_test {

using testing::line;
using testing::over_ranks;
using testing::run_ranks;

constexpr std::int64_t kKiB = 1024;

/// Generators' states (5 KiB for each random operator that still counts), small tables, temporary flags.
constexpr std::int64_t kSlack = 256 * kKiB;

/// Counts what torch's CPU allocator gives this thread. The engine maps its large blocks, shards among them, on its own.
class Allocations : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*data*/, std::int64_t bytes, std::size_t /*allocated*/, std::size_t /*reserved*/,
                         c10::Device /*device*/) override {
    live += bytes;
    peak = std::max(peak, live);
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::int64_t live = 0;
  std::int64_t peak = 0;
};

/// Bytes above what was live before: at most, and afterwards.
struct Memory {
  std::int64_t peak = 0;
  std::int64_t left = 0;
};

template <typename Fn>
Memory memory_of(const std::shared_ptr<Allocations>& allocations, const Fn& fn) {
  const std::int64_t before = allocations->live;
  allocations->peak = before;
  fn();
  return {.peak = allocations->peak - before, .left = allocations->live - before};
}

/// Counts within a rank.
template <typename Fn>
void counted(const Fn& fn) {
  const auto allocations = std::make_shared<Allocations>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, allocations);
  fn(allocations);
}

std::int64_t largest_parameter(const torch::nn::Module& module) {
  std::int64_t bytes = 0;
  for (const auto& parameter : module.parameters()) bytes = std::max(bytes, static_cast<std::int64_t>(parameter.nbytes()));
  return bytes;
}

std::int64_t parameter_bytes(const torch::nn::Module& module) {
  std::int64_t bytes = 0;
  for (const auto& parameter : module.parameters()) bytes += static_cast<std::int64_t>(parameter.nbytes());
  return bytes;
}

/// Units large enough that on four ranks each shard is mapped.
GPT make_gpt() { return GPT(GPTConfig{.vocab = 2304, .dim = 512, .layers = 4, .heads = 8, .hidden = 0, .context = 64, .tied = true}); }

// Shards, plus one parameter: less than one unit.
TEST(DeferredMemory, ShardsAndOneParameter) {
  over_ranks([] {
    const auto mesh = line();
    counted([&](const std::shared_ptr<Allocations>& allocations) {
      for (const bool loop : {false, true}) {
        GPT model(nullptr);
        const auto building = memory_of(allocations, [&] {
          model = deferred_init([&] {
            auto gpt = make_gpt();
            if (loop) {  // every unit's last operator is at the end
              const torch::NoGradGuard no_grad;
              for (auto& item : gpt->named_parameters()) {
                if (item.value().dim() > 1) item.value().normal_(0, 0.02);
              }
            }
            return gpt;
          });
        });
        const std::int64_t largest = largest_parameter(*model);
        EXPECT_LE(building.peak, largest + kSlack);
        EXPECT_LE(building.left, kSlack);

        const auto sharding = memory_of(allocations, [&] {
          const auto sharded = fully_shard(*model, {.mesh = mesh, .units = each<GPTBlockImpl>()});
          EXPECT_EQ(sharded.memory_stats().main_parameters.peak, sharded.memory_stats().total.peak);
          EXPECT_LE(sharded.memory_stats().total.peak, parameter_bytes(*model) / mesh.size() + 64 * kKiB);
        });
        EXPECT_LE(sharding.peak, largest + kSlack);
        // The buffer: the rotary table. What was recorded is gone.
        const auto table = static_cast<std::int64_t>(model->named_buffers()["rotary"].nbytes());
        EXPECT_LE(building.left + sharding.left, table + 4 * kKiB);
      }
    });
  });
}

std::int64_t largest_unit(GPT& model) {
  std::int64_t bytes = 0;
  for (const auto& block : model->modules()) {
    if (block->as<GPTBlockImpl>() != nullptr) bytes = std::max(bytes, parameter_bytes(*block));
  }
  return bytes;
}

TEST(DeferredMemory, Rank0HoldsOneUnitToSendIt) {
  over_ranks([](int rank) {
    const auto mesh = line();
    counted([&](const std::shared_ptr<Allocations>& allocations) {
      auto model = deferred_init([] { return make_gpt(); });
      const auto sharding = memory_of(allocations, [&] {
        (void)fully_shard(*model, {.mesh = mesh, .units = each<GPTBlockImpl>(), .initial_values = InitialValues::kFromRank0});
      });
      EXPECT_LE(sharding.peak, (rank == 0 ? largest_unit(model) : largest_unit(model) / mesh.size()) + kSlack);
    });
  });
}

// The first row's ranks hold the inner shards that they pass on.
TEST(DeferredMemory, OnTwoDimensionsInnerShardsAreHeldToSendThem) {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", 2}});
    for (const auto& outer : {Placements::no_shard(), Placements::optim()}) {
      counted([&](const std::shared_ptr<Allocations>& allocations) {
        auto model = deferred_init([] { return make_gpt(); });
        const auto sharding = memory_of(allocations, [&] {
          const auto sharded = fully_shard(
              *model,
              {.mesh = mesh, .units = each<GPTBlockImpl>(), .outer_placements = outer, .initial_values = InitialValues::kFromRank0});
          EXPECT_LE(sharded.memory_stats().total.peak, parameter_bytes(*model) / 2 + 64 * kKiB);
        });
        const auto inner = largest_unit(model) / 2;
        EXPECT_LE(sharding.peak, (rank == 0 ? 2 * inner : rank == 1 || outer == Placements::no_shard() ? inner : inner / 2) + kSlack);
      });
    }
  });
}

TEST(DeferredMemory, WhoOnlySendsSummonedParametersHoldsOneUnit) {
  run_ranks(2, [](int rank) {
    counted([&](const std::shared_ptr<Allocations>& allocations) {
      auto model = deferred_init([] { return make_gpt(); });
      const auto sharded = fully_shard(*model, {.mesh = line(), .units = each<GPTBlockImpl>()});
      const auto summoning = memory_of(allocations, [&] {
        const SummonFullParams whole(*model, {.writeback = false, .rank0_only = true});
        EXPECT_LE(sharded.memory_stats().gathered_parameters.live, rank == 0 ? parameter_bytes(*model) + kSlack : 0);
      });
      if (rank == 0) {
        EXPECT_GE(summoning.peak, parameter_bytes(*model));
      }
      EXPECT_LE(summoning.peak, (rank == 0 ? parameter_bytes(*model) : std::max(largest_unit(model), largest_parameter(*model))) + kSlack);
      EXPECT_LE(summoning.left, 0);
    });
  });
}

TEST(DeferredMemory, ZeroTakesNothing) {
  run_ranks(2, [] {
    counted([&](const std::shared_ptr<Allocations>& allocations) {
      const auto building = memory_of(allocations, [&] {
        auto model = deferred_init([] { return make_gpt(); }, {.draw = false});
        (void)fully_shard(*model, {.mesh = line(), .units = each<GPTBlockImpl>(), .initial_values = InitialValues::kZero});
      });
      EXPECT_LE(building.peak, kSlack);
    });
  });
}

TEST(DeferredMemory, MaterializedIsTheModelAndOneParameter) {
  run_ranks(1, [] {
    counted([&](const std::shared_ptr<Allocations>& allocations) {
      auto model = deferred_init([] { return make_gpt(); });
      const auto memory = memory_of(allocations, [&] { materialize(*model); });
      EXPECT_LE(memory.peak, parameter_bytes(*model) + kSlack);
      EXPECT_GE(memory.left, parameter_bytes(*model) - kSlack);
    });
  });
}

struct Layers : torch::nn::Module {
  static constexpr std::int64_t kWidth = 1024;
  static constexpr std::int64_t kBytes = kWidth * kWidth * 4;
  explicit Layers(int count) {
    for (int i = 0; i < count; ++i) {
      layers.emplace_back(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
      register_module("layer" + std::to_string(i), layers.back());
    }
  }
  std::vector<torch::nn::Linear> layers;
};

// Each unit's values come from the unit before: what they lead to is computed again for each, and dropped on the way.
TEST(DeferredMemory, UnitsThatComeFromOneAnother) {
  run_ranks(2, [] {
    counted([&](const std::shared_ptr<Allocations>& allocations) {
      const auto model = deferred_init([] {
        auto layers = std::make_shared<Layers>(8);
        const torch::NoGradGuard no_grad;
        for (std::size_t i = 1; i < 8; ++i) layers->layers[i]->weight.copy_(layers->layers[i - 1]->weight * 0.5 + 1);
        return layers;
      });
      const auto sharding = memory_of(allocations, [&] { (void)fully_shard(*model, {.mesh = line(), .units = testing::each_linear()}); });
      EXPECT_LE(sharding.peak, 3 * Layers::kBytes + kSlack);
    });
  });
}

TEST(DeferredMemory, CopiesOfWhatCameFromOutsideGoWithTheirUnits) {
  run_ranks(2, [] {
    counted([&](const std::shared_ptr<Allocations>& allocations) {
      const auto outside = at::ones({Layers::kWidth, Layers::kWidth});
      std::shared_ptr<Layers> model;
      const auto building = memory_of(allocations, [&] {
        model = deferred_init([&] {
          auto layers = std::make_shared<Layers>(4);
          const torch::NoGradGuard no_grad;
          for (const auto& layer : layers->layers) layer->weight.copy_(outside);
          return layers;
        });
      });
      EXPECT_LE(building.left, 4 * Layers::kBytes + kSlack);
      const auto sharding = memory_of(allocations, [&] { (void)fully_shard(*model, {.mesh = line(), .units = testing::each_linear()}); });
      EXPECT_LE(sharding.peak, Layers::kBytes + kSlack);
      EXPECT_LE(building.left + sharding.left, kSlack);
    });
  });
}

TEST(DeferredMemory, AModelThatIsDroppedLeavesNothing) {
  run_ranks(1, [] {
    counted([&](const std::shared_ptr<Allocations>& allocations) {
      const auto memory = memory_of(allocations, [&] {
        deferred_init([] {
          auto layers = std::make_shared<Layers>(4);
          const torch::NoGradGuard no_grad;
          for (const auto& layer : layers->layers) layer->weight.copy_(at::ones({1}).expand({Layers::kWidth, Layers::kWidth}).clone());
          torch::_foreach_mul_(layers->parameters(), 2);
          return layers;
        });
      });
      EXPECT_EQ(memory.left, 0);
    });
  });
}

// Each element by an operator of its own: a chain of operators.
TEST(DeferredMemory, LongChains) {
  run_ranks(1, [] {
    const auto fill = [] {
      auto module = std::make_shared<torch::nn::Module>();
      const auto table = module->register_buffer("table", at::zeros({30000}));
      for (std::int64_t i = 0; i < table.numel(); ++i) table[i] = static_cast<float>(i);
      return module;
    };
    deferred_init(fill);
    const auto module = deferred_init(fill);
    materialize(*module);
    EXPECT_TRUE(torch::equal(module->buffers()[0], at::arange(30000, at::kFloat)));
  });
}

}  // namespace deferred_memory_test
}  // namespace fsdp
