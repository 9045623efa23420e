#include "collectives.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "support/on_device.h"
#include "support/temporary_folder.h"

// Collectives by NCCL's rules.
namespace collectives_test {

using fsdp::testing::current_stream;
using fsdp::testing::expect_report;
using fsdp::testing::order;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::side_stream;
using fsdp::testing::TemporaryFolder;

using Backend = c10::intrusive_ptr<c10d::Backend>;

Backend backend(const TemporaryFolder& folder, int rank, int size, const std::string& name = "all", sim::CollectivesOptions options = {},
                std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(timeout);
  gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  auto store = c10::make_intrusive<c10d::FileStore>(folder.path() / "store", size);
  auto messages = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>(name, store), rank, size, gloo);
  return sim::make_collectives(messages, options);
}

at::Tensor range(int rank, std::int64_t begin, std::int64_t end, at::ScalarType dtype = at::kFloat) {
  return at::arange(begin, end, sim::device(rank)).to(dtype);
}
std::vector<float> values(const at::Tensor& tensor) {
  const auto cpu = tensor.cpu().to(at::kFloat).contiguous();
  return {cpu.const_data_ptr<float>(), cpu.const_data_ptr<float>() + cpu.numel()};
}
using Values = std::vector<float>;

TEST(Collectives, MoveAndSum) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const auto group = backend(folder, rank, 2);
    auto own = range(rank, 2 * rank, 2 * rank + 2);
    auto all = at::empty({4}, own.options());
    group->_allgather_base(all, own)->wait();
    EXPECT_EQ(values(all), (Values{0, 1, 2, 3}));

    auto sum = at::empty({2}, own.options());
    group->_reduce_scatter_base(sum, all)->wait();
    EXPECT_EQ(values(sum), rank == 0 ? (Values{0, 2}) : (Values{4, 6}));
    group->_reduce_scatter_base(sum, all, {.reduceOp = c10d::ReduceOp::AVG})->wait();
    EXPECT_EQ(values(sum), rank == 0 ? (Values{0, 1}) : (Values{2, 3}));

    std::vector<std::int64_t> equal_parts;
    auto exchanged = at::empty({4}, own.options());
    group->alltoall_base(exchanged, all, equal_parts, equal_parts)->wait();
    EXPECT_EQ(values(exchanged), rank == 0 ? (Values{0, 1, 0, 1}) : (Values{2, 3, 2, 3}));

    std::vector<at::Tensor> received = {at::empty({0}, own.options()), at::empty({0}, own.options())};
    std::vector<at::Tensor> sent = received;
    received[static_cast<std::size_t>(1 - rank)] = at::empty({2}, own.options());
    sent[static_cast<std::size_t>(1 - rank)] = own;
    group->alltoall(received, sent)->wait();
    EXPECT_EQ(values(received[static_cast<std::size_t>(1 - rank)]), rank == 0 ? (Values{2, 3}) : (Values{0, 1}));

    std::vector<at::Tensor> tensors = {own};
    group->allreduce(tensors, {.reduceOp = c10d::ReduceOp::MAX})->wait();
    EXPECT_EQ(values(own), (Values{2, 3}));

    own.fill_(rank);
    group->broadcast(tensors, {.rootRank = 1})->wait();
    EXPECT_EQ(values(own), (Values{1, 1}));

    std::vector<std::vector<at::Tensor>> outs = {{at::empty({2}, own.options()), at::empty({2}, own.options())}};
    tensors = {range(rank, rank, rank + 2)};
    group->allgather(outs, tensors)->wait();
    EXPECT_EQ(values(outs[0][1]), (Values{1, 2}));
  });
}

TEST(Collectives, SumInTheTensorsDtype) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const auto group = backend(folder, rank, 2);
    std::vector<at::Tensor> tensors = {
        at::full({1}, rank == 0 ? 256 : 1, at::TensorOptions().device(sim::device(rank)).dtype(at::kBFloat16))};
    group->allreduce(tensors)->wait();
    EXPECT_EQ(values(tensors[0]), Values{256}) << "257 is no bfloat16";
  });
}

TEST(Collectives, BeginBehindTheCurrentStream) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const auto group = backend(folder, rank, 2);
    const auto side = side_stream(rank);
    auto own = range(rank, 0, 2);
    auto all = at::empty({4}, own.options());
    {
      const c10::StreamGuard on_side(side);
      group->_allgather_base(all, own);  // The other stream has written these.
    }
    EXPECT_EQ(sim::take_reports().size(), 2U);
    c10::impl::VirtualGuardImpl(c10::kPrivateUse1).synchronizeDevice(static_cast<c10::DeviceIndex>(rank));
    EXPECT_EQ(values(all), (Values{0, 1, 0, 1})) << "without a wait, it comes when the host waits for the device";
  });
}

// NCCL serializes what one communicator does, by events of its own, on whatever streams it is.
TEST(Collectives, OfOneBackendTakeTheirTimeOneAfterTheOther) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const auto first = backend(folder, rank, 2, "first");
    const auto second = backend(folder, rank, 2, "second");
    const auto time_of_two = [&](const Backend& other) {
      const auto side = side_stream(rank);
      auto own = range(rank, 0, 2);
      auto all = at::empty({4}, own.options());
      auto all_of_side = at::empty({4}, own.options());
      const c10::impl::VirtualGuardImpl device(c10::kPrivateUse1);
      device.synchronizeDevice(static_cast<c10::DeviceIndex>(rank));
      const auto begin = sim::now();
      first->_allgather_base(all, own, {.asyncOp = false});
      {
        const c10::StreamGuard on_side(side);
        other->_allgather_base(all_of_side, own, {.asyncOp = false});
      }
      device.synchronizeDevice(static_cast<c10::DeviceIndex>(rank));
      return sim::now() - begin;
    };
    sim::set_cost({.collective = 1000});
    EXPECT_EQ(time_of_two(first), 2000U);
    EXPECT_EQ(time_of_two(second), 1000U);
    sim::set_cost({});
  });
}

TEST(Collectives, MakeTheStreamWaitThatAsks) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const auto group = backend(folder, rank, 2);
    auto own = range(rank, 0, 2);
    auto all = at::empty({4}, own.options());
    sim::reset_stats(rank);
    auto work = group->_allgather_base(all, own);
    const auto early = all + 1;
    expect_report("read after write: 'aten::add' (operation");
    own.zero_();
    expect_report("write after read: 'aten::zero_' (operation");
    work->wait();
    EXPECT_EQ(sim::stats(rank).all_host_waits(), 0);
    EXPECT_EQ(values(all), (Values{0, 1, 0, 1}));
    const auto side = side_stream(rank);
    work = group->_allgather_base(all, own);
    {
      const c10::StreamGuard on_side(side);
      work->wait();
    }
    const auto of_another_stream = all + 1;
    expect_report("read after write: 'aten::add' (operation");
    order(side, current_stream(rank));
  });
}

TEST(Collectives, KeepTheirTensorsUntilSomebodyWaits) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const auto group = backend(folder, rank, 2);
    auto own = range(rank, 0, 2);
    auto all = at::empty({4}, own.options());
    const auto work = group->_allgather_base(all, own);
    const auto before = sim::stats(rank).allocated;
    own.reset();
    EXPECT_EQ(sim::stats(rank).allocated, before);
    work->wait();
    EXPECT_LT(sim::stats(rank).allocated, before);
  });
}

TEST(Collectives, OnTheCurrentStreamAreInItsOrder) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const auto group = backend(folder, rank, 2);
    auto own = range(rank, 0, 2);
    auto all = at::empty({4}, own.options());
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    group->_allgather_base(all, own, options);
    EXPECT_EQ(values(all + 1), (Values{1, 2, 1, 2}));
  });
}

TEST(Collectives, BeginTogether) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const auto group = backend(folder, rank, 2);
    const int peer = 1 - rank;
    std::vector<at::Tensor> sent = {range(rank, rank, rank + 2)};
    std::vector<at::Tensor> received = {at::empty({2}, sent[0].options())};
    auto all = at::empty({4}, sent[0].options());
    sim::reset_stats(rank);
    group->startCoalescing();
    EXPECT_EQ(group->send(sent, peer, 0), nullptr);
    group->recv(received, peer, 0);
    group->_allgather_base(all, sent[0]);
    EXPECT_EQ(sim::stats(rank).all_kernels(), 0);
    group->endCoalescing()->wait();
    EXPECT_EQ(sim::stats(rank).all_kernels(), 1);
    EXPECT_EQ(values(received[0]), rank == 0 ? (Values{1, 2}) : (Values{0, 1}));
    EXPECT_EQ(values(all), (Values{0, 1, 1, 2}));
    group->startCoalescing();
    EXPECT_EQ(group->endCoalescing(), nullptr);
  });
}

TEST(Collectives, TakeSimulatedTimeBesideTheComputation) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const auto group = backend(folder, rank, 2);
    auto own = range(rank, 0, 2);
    auto all = at::empty({4}, own.options());
    current_stream(rank).synchronize();
    sim::set_cost({.kernel = 1000, .collective = 1500});
    const auto begin = sim::now();
    const auto work = group->_allgather_base(all, own);
    own.sum();
    work->wait();
    current_stream(rank).synchronize();
    EXPECT_EQ(sim::now() - begin, 1500U);
  });
}

// Two ranks that send each other a message, each first its own: NCCL's sends wait for the receiver.
void swap_without_grouping(const TemporaryFolder& folder, int rank, sim::CollectivesOptions options, std::chrono::milliseconds timeout) {
  const auto group = backend(folder, rank, 2, "all", options, timeout);
  std::vector<at::Tensor> sent = {range(rank, rank, rank + 2)};
  std::vector<at::Tensor> received = {at::empty({2}, sent[0].options())};
  const auto send = group->send(sent, 1 - rank, 0);
  group->recv(received, 1 - rank, 0)->wait();
  send->wait();
}

constexpr std::chrono::milliseconds kSoon(1500);

TEST(Collectives, InTurnShowMessagesThatCross) {
  for (const bool in_turn : {false, true}) {
    const TemporaryFolder folder;
    run_ranks_on_device(2, [&](int rank) {
      if (in_turn) {
        EXPECT_ANY_THROW(swap_without_grouping(folder, rank, {.in_turn = sim::InTurn::kOfOneBackend}, kSoon));
      } else {
        swap_without_grouping(folder, rank, {}, std::chrono::seconds(60));
      }
      sim::take_reports();  // What has failed is not in order.
    });
  }
}

/// Two backends, which the ranks call in opposite orders.
void all_reduce_in_opposite_orders(const TemporaryFolder& folder, int rank, sim::CollectivesOptions options,
                                   std::chrono::milliseconds timeout) {
  const auto first = backend(folder, rank, 2, "first", options, timeout);
  const auto second = backend(folder, rank, 2, "second", options, timeout);
  std::vector<at::Tensor> of_first = {range(rank, 0, 2)};
  std::vector<at::Tensor> of_second = {range(rank, 0, 2)};
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  works.push_back(rank == 0 ? first->allreduce(of_first) : second->allreduce(of_second));
  works.push_back(rank == 0 ? second->allreduce(of_second) : first->allreduce(of_first));
  for (const auto& work : works) work->wait();
}

TEST(Collectives, InTurnShowBackendsInAnotherOrder) {
  for (const auto in_turn : {sim::InTurn::kOfOneBackend, sim::InTurn::kOfAllBackends}) {
    const TemporaryFolder folder;
    run_ranks_on_device(2, [&](int rank) {
      if (in_turn == sim::InTurn::kOfAllBackends) {
        EXPECT_ANY_THROW(all_reduce_in_opposite_orders(folder, rank, {.in_turn = in_turn}, kSoon));
      } else {
        all_reduce_in_opposite_orders(folder, rank, {.in_turn = in_turn}, std::chrono::seconds(60));
      }
      sim::take_reports();  // What has failed is not in order.
    });
  }
}

}  // namespace collectives_test
