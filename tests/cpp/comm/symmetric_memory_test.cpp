#include "comm/collectives/symmetric_memory.h"

#include <cstring>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/collectives/native_communicator.h"
#include "support/collective_checks.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/symmetric_allocator.h"

namespace fsdp::comm {
namespace symmetric_memory_test {

using testing::kGather;
using testing::run_ranks;
using testing::SymmetricAllocator;

/// A backend of which every collective is complete at once; remembers what it was given.
class RememberingBackend final : public c10d::Backend {
 public:
  RememberingBackend() : Backend(0, 2) { setGroupUid("the row"); }

  const std::string getBackendName() const override { return "remembering"; }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    connected = true;
    return c10::make_intrusive<Done>();
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& full, at::Tensor& shard, const c10d::AllgatherOptions&) override {
    inputs.push_back(shard);
    return c10::make_intrusive<Done>();
  }
  bool connected = false;
  std::vector<at::Tensor> inputs;

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
    auto memory = symmetric_memory::source(at::kCPU)(100);
    EXPECT_EQ(allocator->allocated, std::vector<std::size_t>{100});
    const auto tensor = tensor_in(memory, 10, at::kFloat);
    EXPECT_TRUE(symmetric_memory::find_peers(tensor, "all"));
    EXPECT_TRUE(symmetric_memory::find_peers(tensor.narrow(0, 5, 2), "all"));
    EXPECT_FALSE(symmetric_memory::find_peers(tensor.narrow(0, 5, 0), "all"));
    EXPECT_FALSE(symmetric_memory::find_peers(at::zeros({10}), "all"));
    EXPECT_EQ(allocator->meetings, (std::vector<SymmetricAllocator::Meeting>{{0, "all"}, {0, "all"}}));
    memory.clear();
    EXPECT_FALSE(symmetric_memory::find_peers(tensor, "all")) << "the block was given back";
  });
}

TEST(SymmetricMemory, IsReusedAndNeverFreed) {
  run_ranks(1, [] {
    const auto allocator = SymmetricAllocator::install();
    const auto source = symmetric_memory::source(at::kCPU);
    auto small = source(100);
    auto large = source(1000);
    const auto* const small_block = small.get();
    const auto* const large_block = large.get();
    large.clear();
    small.clear();
    EXPECT_EQ(allocator->freed, 0) << "NCCL keeps what it has registered";
    auto fits_both = source(80);
    EXPECT_EQ(fits_both.get(), small_block);
    EXPECT_TRUE(symmetric_memory::find_peers(tensor_in(fits_both, 10, at::kFloat), "all"));
    auto fits_large = source(90);
    EXPECT_EQ(fits_large.get(), large_block);
    fits_large.clear();
    EXPECT_EQ(source(1000).get(), large_block) << "a block has the bytes that it was made with";
    auto fits_none = source(1001);
    EXPECT_EQ(allocator->allocated, (std::vector<std::size_t>{100, 1000, 1001}));
  });
}

// Which of them gives back first may differ between ranks.
TEST(SymmetricMemory, SourcesDoNotLendEachOthersBlocks) {
  run_ranks(1, [] {
    const auto allocator = SymmetricAllocator::install();
    auto one = std::make_unique<MemorySource>(symmetric_memory::source(at::kCPU));
    const auto other = symmetric_memory::source(at::kCPU);
    auto block = (*one)(100);
    const auto* const address = block.get();
    block.clear();
    EXPECT_NE(other(100).get(), address);
    EXPECT_EQ((*one)(100).get(), address);
    block = (*one)(100);
    one.reset();
    EXPECT_TRUE(symmetric_memory::find_peers(tensor_in(block, 10, at::kFloat), "all")) << "lent for longer than its source";
    block.clear();
    EXPECT_EQ(allocator->freed, 0);
  });
}

TEST(SymmetricMemory, GathersSendFromItToo) {
  run_ranks(1, [] {
    const auto allocator = SymmetricAllocator::install();
    const auto backend = c10::make_intrusive<RememberingBackend>();
    NativeCommunicator communicator(kRow, backend, nullptr);
    const auto source = communicator.use_memory(at::kCPU, BufferMemory::kSymmetric);
    ASSERT_TRUE(source);
    EXPECT_TRUE(backend->connected);
    const auto memory = source(80);
    const auto full = tensor_in(memory, 20, at::kFloat).fill_(-1);
    const std::vector<GatherPart> parts = {{.full = full, .shard = at::arange(10, at::kFloat)},
                                           {.full = at::zeros({6}), .shard = at::ones({3})}};
    // No header is exchanged in this test: what was started is looked at, and never waited for.
    const std::string ignored = testing::message_of<std::exception>([&] { const auto pending = communicator.all_gather(parts, kGather); });
    ASSERT_EQ(backend->inputs.size(), 2U) << ignored;
    EXPECT_EQ(backend->inputs[0].const_data_ptr(), memory.get());
    EXPECT_TRUE(full.narrow(0, 0, 10).equal(at::arange(10, at::kFloat)));
    EXPECT_EQ(backend->inputs[1].const_data_ptr(), parts[1].shard.const_data_ptr());
    EXPECT_EQ(allocator->meetings, (std::vector<SymmetricAllocator::Meeting>{{0, "the row"}}));
  });
}

TEST(SymmetricMemory, WhereItCannotBeFoundTheRowFails) {
  run_ranks(1, [] {
    const auto allocator = SymmetricAllocator::install();
    NativeCommunicator communicator(kRow, c10::make_intrusive<RememberingBackend>(), nullptr);
    const auto source = communicator.use_memory(at::kCPU, BufferMemory::kSymmetric);
    ASSERT_TRUE(source);
    const auto memory = source(80);
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
