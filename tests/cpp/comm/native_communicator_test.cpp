#include "comm/collectives/native_communicator.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/collectives/pairwise_communicator.h"
#include "support/collective_checks.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/native_world.h"

namespace fsdp::comm {
namespace native_communicator_test {

using testing::Gather;
using testing::kGather;
using testing::kReduce;
using testing::kScatter;
using testing::native_world;
using testing::PieceShape;
using testing::Reduce;
using testing::run_ranks;
using testing::Scatter;

// The backend's own sums of two ranks are exact whatever their order, as a + b is b + a.
const std::vector<PieceShape> kSummedByBackend = {{.numel = 33, .dtype = at::kFloat},
                                                  {.numel = 0, .dtype = at::kFloat},
                                                  {.numel = 65, .dtype = at::kFloat, .out_dtype = at::kFloat, .accumulate = true}};
const std::vector<PieceShape> kSummedHere = {{.numel = 33, .dtype = at::kBFloat16},
                                             {.numel = 64, .dtype = at::kHalf, .out_dtype = at::kHalf},
                                             {.numel = 0, .dtype = at::kHalf},
                                             {.numel = 1000, .dtype = at::kBFloat16, .out_dtype = at::kFloat, .accumulate = true}};

class NativeCommunicatorOfSize : public ::testing::TestWithParam<int> {};

TEST_P(NativeCommunicatorOfSize, AllGathers) {
  run_ranks(GetParam(), [] {
    const auto communicator = native_world();
    for (const auto& shapes : {kSummedByBackend, kSummedHere}) {
      for (const bool alias : {false, true}) {
        Gather gather(*communicator, shapes, 7, alias);
        communicator->all_gather(gather.parts, kGather)->wait();
        gather.check();
      }
      Gather single(*communicator, {shapes[0]}, 8, false);
      communicator->all_gather(single.parts, kGather)->wait();
      single.check();
    }
  });
}

TEST_P(NativeCommunicatorOfSize, ScattersFromAnyRank) {
  run_ranks(GetParam(), [] {
    const auto communicator = native_world();
    for (int root = 0; root < communicator->size(); ++root) {
      Scatter scatter(*communicator, kSummedHere, 30, root, false);
      communicator->scatter(scatter.parts, root, kScatter)->wait();
      scatter.check();
    }
  });
}

TEST_P(NativeCommunicatorOfSize, SumsNarrowDtypesInRankOrder) {
  run_ranks(GetParam(), [] {
    const auto communicator = native_world();
    Reduce reduce(*communicator, kSummedHere, 9, 1.0 / 3);
    communicator->reduce_scatter(reduce.parts, 1.0 / 3, kReduce)->wait();
    reduce.check();
  });
}

TEST_P(NativeCommunicatorOfSize, RanksThatGiveNothingCountAsZero) {
  run_ranks(GetParam(), [] { testing::check_reductions_of_some(*native_world(), kSummedHere, /*all_send=*/true); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, NativeCommunicatorOfSize, ::testing::Values(1, 2, 3));

TEST(NativeCommunicator, LetsTheBackendSumWideDtypes) {
  run_ranks(2, [] {
    const auto communicator = native_world();
    Reduce reduce(*communicator, kSummedByBackend, 10, 0.25);
    communicator->reduce_scatter(reduce.parts, 0.25, kReduce)->wait();
    reduce.check();
    Reduce single(*communicator, {kSummedByBackend[0]}, 11, 0.25);
    communicator->reduce_scatter(single.parts, 0.25, kReduce)->wait();
    single.check();
  });
}

TEST(NativeCommunicator, ASumThatFailsWithoutPeersEndsNothing) {
  run_ranks(1, [] {
    const auto communicator = native_world();
    Reduce reduce(*communicator, {kSummedHere[0]}, 12, 0.25);
    const auto pending = communicator->reduce_scatter(reduce.parts, 0.25, kReduce);
    reduce.parts[0].out.storage().unsafeGetStorageImpl()->set_throw_on_mutable_data_ptr();
    EXPECT_THROW(pending->wait(), c10::Error);
    const std::string again = testing::message_of<CommError>([&] { pending->wait(); });
    EXPECT_TRUE(again.starts_with(describe(kReduce) + " failed: ")) << again;
    Reduce next(*communicator, {kSummedHere[0]}, 13, 0.25);
    communicator->reduce_scatter(next.parts, 0.25, kReduce)->wait();
    next.check();
  });
}

class Done final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return true; }
};

class AllocatingBackend final : public c10d::Backend {
 public:
  AllocatingBackend() : Backend(0, 2) {}
  const std::string getBackendName() const override { return "allocating"; }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    allocated = at::full({size}, 7, options);
    return allocated;
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    ++barriers;
    devices = options.device_ids;
    return c10::make_intrusive<Done>();
  }
  at::Tensor allocated;
  int barriers = 0;
  std::vector<std::int64_t> devices;  ///< Of the last barrier.
};

TEST(NativeCommunicator, GivesTheMemoryOfItsBackend) {
  const Row row{.dim = "dp_shard", .rank = 0, .global_ranks = {0, 1}, .world_size = 2};
  const auto backend = c10::make_intrusive<AllocatingBackend>();
  NativeCommunicator communicator(row, backend, nullptr);
  EXPECT_FALSE(communicator.use_memory(at::kCPU, BufferMemory::kProcess));
  EXPECT_EQ(backend->barriers, 0);
  const auto source = communicator.use_memory(at::kCPU, BufferMemory::kGroup);
  ASSERT_TRUE(source);
  EXPECT_EQ(backend->barriers, 1) << "NCCL has no connections before the first collective";
  EXPECT_TRUE(communicator.use_memory(at::kCPU, BufferMemory::kGroup));
  EXPECT_EQ(backend->barriers, 1);
  EXPECT_TRUE(backend->devices.empty());
  NativeCommunicator with_index(row, backend, nullptr);
  EXPECT_TRUE(with_index.use_memory(at::Device(at::kCPU, 0), BufferMemory::kGroup));
  EXPECT_EQ(backend->devices, std::vector<std::int64_t>{0}) << "NCCL would guess a device";
  auto memory = source(100);
  EXPECT_EQ(memory.get(), backend->allocated.const_data_ptr());
  EXPECT_EQ(memory.device(), at::Device(at::kCPU));
  const auto storage = backend->allocated.storage().getWeakStorageImpl();
  backend->allocated = at::Tensor();
  EXPECT_FALSE(storage.expired());
  EXPECT_EQ(static_cast<const char*>(memory.get())[99], 7);
  memory.clear();
  EXPECT_TRUE(storage.expired());
  NativeCommunicator alone({.dim = "dp_shard", .rank = 0, .global_ranks = {0}, .world_size = 1}, nullptr, nullptr);
  EXPECT_FALSE(alone.use_memory(at::kCPU, BufferMemory::kGroup));
}

TEST(NativeCommunicator, NeedsLittleStagingWhereTheBackendSums) {
  run_ranks(3, [] {
    const auto communicator = native_world();
    EXPECT_EQ(communicator->staging_numel(10), 20);
    EXPECT_EQ(communicator->staging_numel(10, at::kFloat), 10);
    EXPECT_EQ(communicator->staging_numel(10, at::kBFloat16), 20);
  });
}

TEST(NativeCommunicator, CountsLikeThePairwiseOne) {
  run_ranks(3, [] {
    const auto communicator = native_world();
    communicator->reset_stats();
    Gather gather(*communicator, kSummedHere, 7, false);
    communicator->all_gather(gather.parts, kGather)->wait();
    EXPECT_EQ(communicator->stats().all_gather_bytes, 2 * 2 * (33 + 64 + 1000));
    EXPECT_EQ(communicator->stats().all_gathers, 1);
  });
}

// Launches what comes between startCoalescing and endCoalescing together, as NCCL does, and refuses the k-th operation.
class CoalescingBackend final : public c10d::Backend {
 public:
  explicit CoalescingBackend(int refused) : Backend(0, 2), refused_(refused) {}

  const std::string getBackendName() const override { return "coalescing"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    EXPECT_FALSE(coalescing_) << "a group was left open";
    coalescing_ = true;
    log.emplace_back("start");
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    EXPECT_TRUE(coalescing_);
    coalescing_ = false;
    log.emplace_back("end");
    return {};
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int) override {
    log.push_back(std::to_string(tensors[0].nbytes()) + " of " + c10::toString(tensors[0].scalar_type()) + " to " + std::to_string(peer));
    return operation();
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int) override {
    log.push_back(std::to_string(tensors[0].nbytes()) + " of " + c10::toString(tensors[0].scalar_type()) + " from " + std::to_string(peer));
    return operation();
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    log.emplace_back("barrier");
    return c10::make_intrusive<Done>();
  }
  void abort() override { log.emplace_back("abort"); }
  void shutdown() override { log.emplace_back("shutdown"); }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override { return operation(); }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override {
    return operation();
  }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
                                                                 const c10d::AllgatherOptions&) override {
    log.push_back("gather " + sizes(ins) + " into " + sizes(outs));
    return operation();
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
                                                                 const c10d::ReduceScatterOptions&) override {
    log.push_back("sum " + sizes(ins) + " into " + sizes(outs));
    return operation();
  }

  bool coalescing() const { return coalescing_; }
  std::vector<std::string> log;

 private:
  static std::string sizes(const std::vector<at::Tensor>& tensors) {
    std::string text;
    for (const at::Tensor& tensor : tensors) text += c10::toString(tensor.scalar_type()) + std::to_string(tensor.numel()) + " ";
    return text;
  }
  c10::intrusive_ptr<c10d::Work> operation() {
    if (operations_++ == refused_) throw std::runtime_error("out of memory");
    return c10::make_intrusive<Done>();
  }

  const int refused_;
  int operations_ = 0;
  bool coalescing_ = false;
};

TEST(NativeCommunicator, AnOperationThatThrowsEndsItsCoalescedGroup) {
  const std::vector<PieceShape> shapes = {
      {.numel = 3, .dtype = at::kFloat}, {.numel = 4, .dtype = at::kBFloat16}, {.numel = 5, .dtype = at::kFloat}};
  const Row row{.dim = "dp_shard", .rank = 0, .global_ranks = {0, 1}, .world_size = 2};
  for (int refused = 0; refused < 3; ++refused) {
    for (const bool gathers : {true, false}) {
      const auto backend = c10::make_intrusive<CoalescingBackend>(refused);
      NativeCommunicator communicator(row, backend, /*control=*/{});
      Gather gather(communicator, shapes, 1, false);
      Reduce reduce(communicator, shapes, 1, 1);
      const std::string message = testing::message_of<CommError>([&] {
        const auto pending =
            gathers ? communicator.all_gather(gather.parts, kGather) : communicator.reduce_scatter(reduce.parts, 1, kReduce);
      });
      EXPECT_EQ(testing::has(message, "out of memory"), refused < (gathers ? 2 : 3)) << message;
      EXPECT_FALSE(backend->coalescing()) << "operation " << refused;
    }
  }
}

// A call for each parameter would cost the host more than all else of a gather.
TEST(NativeCommunicator, ABackendThatCoalescesGetsOneCallForEachDtype) {
  using Log = std::vector<std::string>;
  const std::vector<PieceShape> shapes = {{.numel = 3, .dtype = at::kFloat},
                                          {.numel = 4, .dtype = at::kDouble},
                                          {.numel = 0, .dtype = at::kFloat},
                                          {.numel = 5, .dtype = at::kFloat},
                                          {.numel = 6, .dtype = at::kDouble}};
  const Row row{.dim = "dp_shard", .rank = 0, .global_ranks = {0, 1}, .world_size = 2};
  const auto backend = c10::make_intrusive<CoalescingBackend>(/*refused=*/-1);
  NativeCommunicator communicator(row, backend, /*control=*/{});
  Gather gather(communicator, shapes, 1, false);
  const auto gathering = communicator.all_gather(gather.parts, kGather);
  EXPECT_EQ(std::exchange(backend->log, {}),
            (Log{"gather Float3 Float5  into Float6 Float10 ", "gather Double4 Double6  into Double8 Double12 "}));
  Reduce reduce(communicator, shapes, 1, 1);
  const auto reducing = communicator.reduce_scatter(reduce.parts, 1, kReduce);
  EXPECT_EQ(std::exchange(backend->log, {}),
            (Log{"sum Float6 Float10  into Float3 Float5 ", "sum Double8 Double12  into Double4 Double6 "}));
}

// NCCL would connect each pair of ranks for single messages, knows neither int16 nor complex numbers, and waits for all ranks at first.
TEST(NativeCommunicator, ScattersBytesInOneLaunch) {
  using Log = std::vector<std::string>;
  const Row row{.dim = "dp_shard", .rank = 0, .global_ranks = {0, 1}, .world_size = 2};
  const auto backend = c10::make_intrusive<CoalescingBackend>(/*refused=*/-1);
  NativeCommunicator communicator(row, backend, /*control=*/{});
  const at::Tensor shorts = at::ones({3}, at::kShort);
  const at::Tensor complex = at::ones({2}, at::kComplexFloat);
  const std::vector<ScatterPart> sent = {{.shards = {shorts, shorts}, .into = at::empty_like(shorts)},
                                         {.shards = {complex, complex}, .into = at::empty_like(complex)}};
  communicator.scatter(sent, /*root=*/0, kScatter);
  EXPECT_EQ(std::exchange(backend->log, {}), (Log{"barrier", "start", "6 of Byte to 1", "16 of Byte to 1", "end"}));
  const std::vector<ScatterPart> received = {{.shards = {}, .into = at::empty_like(complex)}};
  communicator.scatter(received, /*root=*/1, kScatter);
  EXPECT_EQ(std::exchange(backend->log, {}), (Log{"start", "16 of Byte from 1", "end"}));
  const auto fresh = c10::make_intrusive<CoalescingBackend>(/*refused=*/-1);
  NativeCommunicator with_nothing(row, fresh, /*control=*/{});
  const std::vector<ScatterPart> nothing = {{.shards = {}, .into = at::empty({0}, at::kShort)}};
  with_nothing.scatter(nothing, /*root=*/1, kScatter);
  EXPECT_EQ(fresh->log, (Log{"barrier", "start", "end"}));
}

TEST(NativeCommunicator, ItsOwnBackendIsShutDownOrAborted) {
  using Log = std::vector<std::string>;
  const Row row{.dim = "dp_shard", .rank = 0, .global_ranks = {0, 1}, .world_size = 2};
  for (const auto ends : {Group::Ends::kWithGroup, Group::Ends::kElsewhere}) {
    const auto used = c10::make_intrusive<CoalescingBackend>(/*refused=*/-1);
    std::make_unique<NativeCommunicator>(row, used, /*control=*/nullptr, /*ranks_per_host=*/1, ends).reset();
    EXPECT_EQ(used->log, ends == Group::Ends::kWithGroup ? Log{"shutdown"} : Log{});
    // What a failed collective has begun must not write into memory that others have by then; shutting down would wait for it.
    const auto failed = c10::make_intrusive<CoalescingBackend>(/*refused=*/0);
    auto communicator = std::make_unique<NativeCommunicator>(row, failed, /*control=*/nullptr, /*ranks_per_host=*/1, ends);
    Gather gather(*communicator, {{.numel = 3, .dtype = at::kFloat}}, 1, false);
    EXPECT_THROW(communicator->all_gather(gather.parts, kGather), CommError);
    communicator.reset();
    EXPECT_EQ(failed->log, Log{"abort"});
  }
}

TEST(NativeCommunicator, AWatchdogComesAfterTheTimeOut) {
  using std::chrono::minutes;
  using std::chrono::seconds;
  EXPECT_EQ(watchdog_timeout(minutes(10)), minutes(11));
  EXPECT_EQ(watchdog_timeout(seconds(1)), seconds(11));
}

TEST(NativeCommunicator, RanksThatDivergeNameEachOther) {
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [&](int rank) {
      const auto communicator = native_world();
      const std::string message = testing::message_of<CommError>([&] {
        // Sizes and dtypes are the same, so the backend sees nothing. Who is no neighbour of rank 1 learns of it at one of the next.
        for (int i = 0; i < 3; ++i) {
          Gather gather(*communicator, kSummedByBackend, 7, false);
          communicator->all_gather(gather.parts, {.operation = "all-gather", .unit = rank == 1 ? "layers.1" : "layers.0"})->wait();
          EXPECT_TRUE(rank == 0 || rank == 3) << "took another unit for its own";
        }
      });
      EXPECT_TRUE(testing::has(message, "#2 all-gather of unit 'layers.0'") && testing::has(message, "#2 all-gather of unit 'layers.1'"))
          << message;
    });
  }
}

}  // namespace native_communicator_test
}  // namespace fsdp::comm
