// Activation checkpointing: what it keeps between forward and backward, and what the engine needs beside it.

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "fsdp/activation_checkpoint.h"
#include "fsdp/fsdp.h"
#include "support/stack.h"
#include "support/twins.h"

namespace fsdp {
namespace activation_checkpoint_memory_test {

using testing::expect_same;
using testing::line;
using testing::NamedTensors;
using testing::normal;
using testing::over_ranks;

/// Counts the bytes that tensors on the CPU hold.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, /*priority=*/255); }
  ~CountingAllocator() override { c10::SetCPUAllocator(inner_, /*priority=*/255); }
  CountingAllocator(const CountingAllocator&) = delete;
  CountingAllocator& operator=(const CountingAllocator&) = delete;

  c10::DataPtr allocate(std::size_t bytes) override {
    // The block's size lies before it. torch asks some allocators for plain pointers: data and context must be the same.
    auto* block = static_cast<char*>(std::aligned_alloc(kAlignment, (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment));
    std::memcpy(block, &bytes, sizeof(bytes));
    live += static_cast<std::int64_t>(bytes);
    peak = std::max(peak, live);
    return {block + kAlignment, block + kAlignment, &free_block, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  static inline std::int64_t live = 0;
  static inline std::int64_t peak = 0;

 private:
  static constexpr std::size_t kAlignment = 64;

  static void free_block(void* data) {
    auto* block = static_cast<char*>(data) - kAlignment;
    std::size_t bytes = 0;
    std::memcpy(&bytes, block, sizeof(bytes));
    live -= static_cast<std::int64_t>(bytes);
    std::free(block);
  }

  c10::Allocator* inner_;
};

TEST(CheckpointMemory, KeepsOnlyInputs) {
  constexpr std::int64_t kDepth = 6;
  constexpr std::int64_t kNarrow = 64 * 32 * 4;  // bytes of what passes between blocks
  constexpr std::int64_t kWide = 64 * 128 * 4;   // of what is inside
  std::vector<torch::nn::Linear> up, down;
  for (std::int64_t k = 0; k < kDepth; ++k) {
    up.emplace_back(32, 128);
    down.emplace_back(128, 32);
  }
  struct Bytes {
    std::int64_t after_forward = 0;
    std::int64_t peak = 0;
  };
  const CountingAllocator allocator;
  const auto bytes_of = [&](bool checkpoints, bool preserve_rng_state) {
    for (std::int64_t k = 0; k < kDepth; ++k) {  // gradients that are there already do not count
      up[k]->weight.mutable_grad() = at::zeros_like(up[k]->weight);
      up[k]->bias.mutable_grad() = at::zeros_like(up[k]->bias);
      down[k]->weight.mutable_grad() = at::zeros_like(down[k]->weight);
      down[k]->bias.mutable_grad() = at::zeros_like(down[k]->bias);
    }
    auto x = normal({64, 32}, 1);
    const auto before = CountingAllocator::live;
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> inside;
    for (std::int64_t k = 0; k < kDepth; ++k) {
      const auto block = [&, k](const at::Tensor& x) {
        const auto h = up[k](x);
        inside.emplace_back(h.getIntrusivePtr());
        return down[k](at::gelu(h));
      };
      x = checkpoints ? activation_checkpoint({.preserve_rng_state = preserve_rng_state}, block, x) : block(x);
    }
    for (const auto& tensor : inside) EXPECT_TRUE(tensor.expired() || !checkpoints);
    Bytes bytes;
    bytes.after_forward = CountingAllocator::live - before;
    const auto gradient = at::ones_like(x);
    CountingAllocator::peak = CountingAllocator::live;
    x.backward(gradient);
    bytes.peak = CountingAllocator::peak - before;
    return bytes;
  };
  const auto plain = bytes_of(false, false);
  const auto checkpointed = bytes_of(true, false);
  const auto with_rng_state = bytes_of(true, true);
  EXPECT_EQ(plain.after_forward, kDepth * (kNarrow + 2 * kWide));
  EXPECT_EQ(checkpointed.after_forward, kDepth * kNarrow);
  const auto rng_state = static_cast<std::int64_t>(at::detail::getDefaultCPUGenerator().get_state().nbytes());
  EXPECT_EQ(with_rng_state.after_forward, kDepth * (kNarrow + rng_state));
  // Backward: the inputs, and one block: what it saves, gradients on their way through it, and of one weight.
  EXPECT_GE(plain.peak, plain.after_forward);
  EXPECT_LE(checkpointed.peak, checkpointed.after_forward + 4 * kWide + 3 * kNarrow + 32 * 128 * 4);
}

/// What a step of the Stack needs, in the steady state.
struct Needs {
  MemoryStats memory;
  WireStats wire;
  NamedTensors gradients;
};

/// Blocks in checkpoints of `together` at a time; 0 for none.
Needs needs_of(int rank, const FullyShardOptions& options, std::size_t together) {
  auto model = testing::make_stack({.width = 10, .hidden = {13, 7, 22, 16}});
  auto sharded = fully_shard(*model, options);
  for (int step = 0; step < 4; ++step) {
    sharded.zero_grad();
    sharded.reset_peak_memory_stats();
    sharded.reset_wire_stats();
    auto x = model->entry(testing::stack_input(step, rank));
    const auto blocks = [&](std::size_t begin, std::size_t end) {
      return [&, begin, end](at::Tensor x) {
        for (std::size_t k = begin; k < end; ++k) x = model->blocks->at<testing::StackBlockImpl>(k).forward(x);
        return x;
      };
    };
    const std::size_t depth = model->blocks->size();
    if (together == 0) {
      x = blocks(0, depth)(x);
    } else {
      for (std::size_t k = 0; k < depth; k += together) x = activation_checkpoint(blocks(k, k + together), x);
    }
    model->head(x).square().mean().backward();
  }
  Needs needs{.memory = sharded.memory_stats(), .wire = sharded.wire_stats(), .gradients = {}};
  needs.gradients = sharded.full_gradients();
  return needs;
}

TEST(CheckpointMemory, TheEngineNeedsNoMoreMemory) {
  over_ranks([](int rank) {
    for (const auto& strategy : testing::all_strategies()) {
      for (const int depth : {0, 1}) {
        const FullyShardOptions options{
            .mesh = line(), .units = testing::stack_units(), .placements = Placements::from_name(strategy), .prefetch_depth = depth};
        const auto what = strategy + ", prefetch_depth " + std::to_string(depth);
        const auto plain = needs_of(rank, options, 0);
        const auto one = needs_of(rank, options, 1);
        expect_same(one.gradients, plain.gradients, 0, what);
        EXPECT_EQ(one.memory.gathered_parameters.peak, plain.memory.gathered_parameters.peak) << what;
        EXPECT_EQ(one.memory.unreduced_gradients.peak, plain.memory.unreduced_gradients.peak) << what;
        EXPECT_EQ(one.memory.total.peak, plain.memory.total.peak) << what;
        EXPECT_EQ(one.memory.slot_allocations, plain.memory.slot_allocations) << what;
        EXPECT_EQ(one.wire.all_gathers, plain.wire.all_gathers) << what;
        EXPECT_EQ(one.wire.reduce_scatters, plain.wire.reduce_scatters) << what;
        EXPECT_EQ(one.wire.control_bytes, plain.wire.control_bytes) << what << ": backward ends once";
        // Several units in a checkpoint: gathered once more each, except the last, but never more of them at once.
        const auto two = needs_of(rank, options, 2);
        expect_same(two.gradients, plain.gradients, 0, what);
        EXPECT_LE(two.memory.gathered_parameters.peak, plain.memory.gathered_parameters.peak) << what;
        EXPECT_EQ(two.memory.unreduced_gradients.peak, plain.memory.unreduced_gradients.peak) << what;
        EXPECT_EQ(two.wire.reduce_scatters, plain.wire.reduce_scatters) << what;
        EXPECT_EQ(two.wire.control_bytes, plain.wire.control_bytes) << what;
      }
    }
  });
}

}  // namespace activation_checkpoint_memory_test
}  // namespace fsdp
