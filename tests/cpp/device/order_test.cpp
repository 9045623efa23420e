#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "access_map.h"
#include "clock.h"
#include "support/on_device.h"

// What the device reports, and what it does not.
namespace order_test {

using fsdp::testing::current_stream;
using fsdp::testing::expect_report;
using fsdp::testing::order;
using fsdp::testing::side_stream;
using sim::device;

at::Tensor ones(std::int64_t numel = 1000) { return at::ones({numel}, device()); }

TEST(DeviceOrder, StreamsThatAnEventOrders) {
  const auto side = side_stream();
  const auto value = ones();
  order(current_stream(), side);
  at::Tensor twice;
  {
    const c10::StreamGuard on_side(side);
    twice = value * 2;
  }
  order(side, current_stream());
  EXPECT_EQ((twice + value).sum().item<float>(), 3000);
}

TEST(DeviceOrder, ReadAfterWrite) {
  const auto side = side_stream();
  const auto value = ones();
  order(current_stream(), side);
  {
    const c10::StreamGuard on_side(side);
    value.mul_(2);
  }
  const auto read = value + 1;
  expect_report("read after write: 'aten::add' (operation");
  order(side, current_stream());
}

TEST(DeviceOrder, WriteAfterRead) {
  const auto side = side_stream();
  const auto value = ones();
  const auto copy = at::empty_like(value);
  order(current_stream(), side);
  {
    const c10::StreamGuard on_side(side);
    copy.copy_(value);
  }
  value.zero_();
  expect_report("write after read: 'aten::zero_' ");
  value.zero_();  // Behind the first write, which has told it.
  order(side, current_stream());
}

TEST(DeviceOrder, WriteAfterWrite) {
  const auto side = side_stream();
  const auto value = ones();
  {
    const c10::StreamGuard on_side(side);
    value.zero_();
  }
  expect_report("write after write: 'aten::zero_' ");
  order(side, current_stream());
}

TEST(DeviceOrder, AnEventIsOfWhenItWasRecorded) {
  const auto side = side_stream();
  const auto value = ones();
  c10::Event early(c10::kPrivateUse1);
  early.record(current_stream());
  value.mul_(2);
  early.block(side);
  {
    const c10::StreamGuard on_side(side);
    const auto read = value + 1;
    expect_report("read after write");
  }
  order(side, current_stream());
}

TEST(DeviceOrder, DisjointPartsOfOneMemory) {
  const auto side = side_stream();
  const auto value = ones();
  const auto matrix = ones(100).view({10, 10});
  order(current_stream(), side);
  {
    const c10::StreamGuard on_side(side);
    value.narrow(0, 0, 500).add_(1);
    matrix.narrow(1, 0, 5).add_(1);  // every row's first half
  }
  value.narrow(0, 500, 500).add_(1);
  matrix.narrow(1, 5, 5).add_(1);
  order(side, current_stream());
}

TEST(DeviceOrder, DevicesHaveStreamsOfTheirOwn) {
  const auto value = at::ones({10}, device(1));
  value.add_(1);
  ones().add_(1);  // The default stream of device 0 does not order that of device 1.
  const c10::impl::VirtualGuardImpl guard(c10::kPrivateUse1);
  c10::Event after(c10::kPrivateUse1);
  after.record(guard.getStream(device(0)));
  const auto side = guard.getStreamFromGlobalPool(device(1));
  after.block(side);
  {
    const c10::StreamGuard on_side(side);
    value.add_(1);
  }
  expect_report("write after write");
  order(side, guard.getStream(device(1)));
}

TEST(DeviceOrder, TheHostWaits) {
  const auto side = side_stream();
  const auto value = ones();
  order(current_stream(), side);
  {
    const c10::StreamGuard on_side(side);
    value.mul_(2);
  }
  side.synchronize();
  EXPECT_EQ(value.sum().item<float>(), 2000) << "what the host knows, it tells with each kernel";
}

TEST(DeviceOrder, AQueryIsAnsweredLate) {
  const auto side = side_stream();
  const auto value = ones();
  order(current_stream(), side);
  c10::Event done(c10::kPrivateUse1);
  {
    const c10::StreamGuard on_side(side);
    value.mul_(2);
    done.record(side);
  }
  EXPECT_FALSE(done.query());
  EXPECT_TRUE(done.query());
  value.add_(1);
}

TEST(DeviceOrder, WhatNobodyHasWritten) {
  sim::set_options({.uninitialized = true});
  const auto value = at::empty({1000}, device());
  value.narrow(0, 0, 500).zero_();
  const auto fine = value.narrow(0, 0, 500) + 1;
  EXPECT_TRUE(sim::take_reports().empty());
  const auto read = value + 1;
  expect_report("not initialized: 'aten::add");
  sim::set_options({});
}

TEST(DeviceOrder, BackwardFollowsTheStreamOfForward) {
  fsdp::testing::run_ranks_on_device(1, [] {
    const auto side = side_stream();
    const auto weight = at::ones({10}, device()).requires_grad_();
    order(current_stream(), side);
    at::Tensor loss;
    {
      const c10::StreamGuard on_side(side);
      loss = (weight * 2).square().sum();
    }
    loss.backward();
    EXPECT_EQ(weight.grad().cpu().sum().item<float>(), 80);
  });
}

TEST(AccessMap, CutsAndJoinsRanges) {
  sim::AccessMap map;
  sim::Clock first, second;
  const sim::Access by_first{.agent = 1, .epoch = first.tick(1, 0), .operation = 1};
  const sim::Access by_second{.agent = 2, .epoch = second.tick(2, 0), .operation = 2};
  std::vector<std::string> conflicts;
  const auto on_conflict = [&](sim::AccessMap::Conflict, const sim::Access& earlier) {
    conflicts.push_back(std::to_string(earlier.agent));
  };
  map.add(first, by_first, {.begin = 100, .end = 200, .write = true}, on_conflict);
  map.add(second, by_second, {.begin = 50, .end = 100, .write = true}, on_conflict);
  map.add(second, by_second, {.begin = 200, .end = 300, .write = true}, on_conflict);
  EXPECT_TRUE(conflicts.empty());
  map.add(second, by_second, {.begin = 199, .end = 201, .write = false}, on_conflict);
  EXPECT_EQ(conflicts, std::vector<std::string>{"1"});
  std::size_t visited = 0;
  map.for_each(0, 1000, [&](const sim::Access&) { ++visited; });
  EXPECT_EQ(visited, 7U) << "five parts with a write each, and two of them with a read";
}

}  // namespace order_test
