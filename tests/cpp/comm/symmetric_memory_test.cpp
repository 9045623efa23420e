#include "comm/symmetric_memory.h"

#include <cstring>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/native_communicator.h"
#include "support/collective_checks.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/symmetric_allocator.h"

namespace fsdp::comm {
namespace symmetric_memory_test {

using testing::kGather;
using testing::kReduce;
using testing::run_ranks;
using testing::SymmetricAllocator;

/// A backend of which every collective is complete at once; remembers what it was given.
class RememberingBackend final : public c10d::Backend {
 public:
  RememberingBackend() : Backend(0, 2) { setGroupUid("the row"); }

  const std::string getBackendName() const override { return "remembering"; }
  void eagerConnectSingleDevice(at::Device) override { connected = true; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& full, at::Tensor& shard, const c10d::AllgatherOptions&) override {
    inputs.push_back(shard);
    outputs.push_back(full);
    return c10::make_intrusive<Done>();
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions&) override {
    output.copy_(input.slice(0, 0, output.numel()));
    return c10::make_intrusive<Done>();
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>&,
                                               std::vector<std::int64_t>&, const c10d::AllToAllOptions&) override {
    output.copy_(input);
    return c10::make_intrusive<Done>();
  }

  bool connected = false;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;

 private:
  class Done final : public c10d::Work {
   public:
    bool wait(std::chrono::milliseconds) override { return true; }
  };
};

const Row kRow = {.dim = "dp_shard", .rank = 0, .global_ranks = {0, 1}, .world_size = 2};

at::Tensor tensor_in(const c10::DataPtr& memory, std::int64_t numel, at::ScalarType dtype) {
  return at::from_blob(memory.get(), {numel}, at::TensorOptions().dtype(dtype));
}

TEST(SymmetricMemory, IsWhatTorchGivesAndFindsPeersOfThatAlone) {
  run_ranks(1, [] {
    EXPECT_FALSE(symmetric_memory::exists(at::kCPU));
    const auto allocator = SymmetricAllocator::install();
    EXPECT_TRUE(symmetric_memory::exists(at::kCPU));
    auto memory = symmetric_memory::allocate(at::kCPU, 100);
    EXPECT_EQ(allocator->allocated, std::vector<std::size_t>{100});
    const auto tensor = tensor_in(memory, 10, at::kFloat);
    EXPECT_TRUE(symmetric_memory::find_peers(tensor, "all"));
    EXPECT_TRUE(symmetric_memory::find_peers(tensor.narrow(0, 5, 2), "all"));
    EXPECT_FALSE(symmetric_memory::find_peers(tensor.narrow(0, 5, 0), "all"));
    EXPECT_FALSE(symmetric_memory::find_peers(at::zeros({10}), "all"));
    ASSERT_EQ(allocator->meetings.size(), 2U);
    EXPECT_EQ(allocator->meetings[1].block, memory.get());
    EXPECT_EQ(allocator->meetings[1].group, "all");
    memory.clear();
    EXPECT_EQ(allocator->live, 0);
    EXPECT_FALSE(symmetric_memory::find_peers(tensor, "all")) << "the block was given back";
  });
}

TEST(SymmetricMemory, GathersSendFromItToo) {
  run_ranks(1, [] {
    const auto allocator = SymmetricAllocator::install();
    const auto backend = c10::make_intrusive<RememberingBackend>();
    NativeCommunicator communicator(kRow, backend, nullptr);
    EXPECT_TRUE(communicator.use_memory(at::kCPU, BufferMemory::kSymmetric));
    EXPECT_TRUE(backend->connected);
    const auto memory = communicator.allocate(at::kCPU, 80);
    const auto full = tensor_in(memory, 20, at::kFloat).fill_(-1);
    const std::vector<GatherPart> parts = {{.full = full, .shard = at::arange(10, at::kFloat)},
                                           {.full = at::zeros({6}), .shard = at::ones({3})}};
    // No header is exchanged in this test: what was started is looked at, and never waited for.
    const std::string ignored = testing::message_of<std::exception>([&] { const auto pending = communicator.all_gather(parts, kGather); });
    ASSERT_EQ(backend->inputs.size(), 2U) << ignored;
    EXPECT_EQ(backend->inputs[0].const_data_ptr(), memory.get());
    EXPECT_TRUE(full.narrow(0, 0, 10).equal(at::arange(10, at::kFloat)));
    EXPECT_EQ(backend->inputs[1].const_data_ptr(), parts[1].shard.const_data_ptr());
    ASSERT_EQ(allocator->meetings.size(), 1U);
    EXPECT_EQ(allocator->meetings[0].group, "the row");
  });
}

TEST(SymmetricMemory, SumsOfTheBackendRunInIt) {
  run_ranks(1, [] {
    const auto allocator = SymmetricAllocator::install();
    const auto backend = c10::make_intrusive<RememberingBackend>();
    NativeCommunicator communicator(kRow, backend, nullptr);
    ASSERT_TRUE(communicator.use_memory(at::kCPU, BufferMemory::kSymmetric));
    const auto reduce = [&](at::ScalarType dtype) {
      const auto unreduced = symmetric_memory::allocate(at::kCPU, 80);
      const auto staging = symmetric_memory::allocate(at::kCPU, 80);
      const std::vector<ReducePart> parts = {
          {.unreduced = tensor_in(unreduced, 20, dtype), .staging = tensor_in(staging, 20, dtype), .out = at::zeros({10})}};
      testing::message_of<std::exception>([&] { const auto pending = communicator.reduce_scatter(parts, 1, kReduce); });
      return std::vector<const void*>{unreduced.get(), staging.get()};
    };
    const auto wide = reduce(at::kFloat);
    ASSERT_EQ(allocator->meetings.size(), 2U);
    EXPECT_EQ(allocator->meetings[0].block, wide[0]);
    EXPECT_EQ(allocator->meetings[1].block, wide[1]);
    reduce(at::kBFloat16);
    EXPECT_EQ(allocator->meetings.size(), 2U) << "messages have no use for it";
    ASSERT_TRUE(communicator.use_memory(at::kCPU, BufferMemory::kProcess));
    reduce(at::kFloat);
    EXPECT_EQ(allocator->meetings.size(), 2U);
  });
}

TEST(SymmetricMemory, WhereItCannotBeFoundTheRowFails) {
  run_ranks(1, [] {
    const auto allocator = SymmetricAllocator::install();
    NativeCommunicator communicator(kRow, c10::make_intrusive<RememberingBackend>(), nullptr);
    ASSERT_TRUE(communicator.use_memory(at::kCPU, BufferMemory::kSymmetric));
    const auto memory = communicator.allocate(at::kCPU, 80);
    const std::vector<GatherPart> parts = {{.full = tensor_in(memory, 20, at::kFloat), .shard = at::ones({10})}};
    allocator->refuses = true;
    const auto gather = [&] { const auto pending = communicator.all_gather(parts, kGather); };
    EXPECT_TRUE(testing::has(testing::message_of<CommError>(gather), "no window"));
    allocator->refuses = false;
    EXPECT_TRUE(testing::has(testing::message_of<CommError>(gather), "no window")) << "all later ones fail, on all ranks";
  });
}

TEST(SymmetricMemory, WhereThereIsNoneBuffersStayInTheProcess) {
  run_ranks(1, [] {
    const auto backend = c10::make_intrusive<RememberingBackend>();
    NativeCommunicator communicator(kRow, backend, nullptr);
    EXPECT_FALSE(communicator.use_memory(at::kCPU, BufferMemory::kSymmetric));
    EXPECT_FALSE(backend->connected);
  });
}

}  // namespace symmetric_memory_test
}  // namespace fsdp::comm
