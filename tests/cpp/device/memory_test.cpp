#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <utility>

#include "support/on_device.h"

// The device's memory, and pinned memory of the host.
namespace memory_test {

using fsdp::testing::current_stream;
using fsdp::testing::expect_report;
using fsdp::testing::order;
using fsdp::testing::side_stream;
using sim::device;

at::Tensor ones(std::int64_t numel = 1000) { return at::ones({numel}, device()); }
at::Tensor pinned(std::int64_t numel, float value) { return at::full({numel}, value, at::TensorOptions().pinned_memory(true)); }
at::Tensor doubled_on(c10::Stream stream, const at::Tensor& value) {
  const c10::StreamGuard on_stream(stream);
  return value * 2;
}

TEST(DeviceMemory, IsFreedWhileAnotherStreamUsesIt) {
  const auto side = side_stream();
  auto value = ones();
  order(current_stream(), side);
  const auto twice = doubled_on(side, value);
  value.reset();
  expect_report("freed early: memory of the default stream, which does not know that 'aten::mul'");
  order(side, current_stream());
}

TEST(DeviceMemory, MayBeJudgedWhenItIsUsedAgain) {
  sim::set_options({.judge_at_reuse = true});
  const auto side = side_stream();
  auto value = ones();
  order(current_stream(), side);
  auto twice = doubled_on(side, value);
  value.reset();
  order(side, current_stream());
  auto again = ones();  // Behind the other stream now.
  EXPECT_TRUE(sim::take_reports().empty());
  order(current_stream(), side);
  twice = doubled_on(side, again);
  again.reset();
  again = at::empty({1000}, device());
  expect_report("write after read: 'allocate'");
  order(side, current_stream());
  sim::set_options({});
}

TEST(DeviceMemory, OfRecordedStreamsIsUsedAgainBehindThem) {
  const auto side = side_stream();
  auto value = ones();
  const auto* const address = value.data_ptr();
  order(current_stream(), side);
  const auto twice = doubled_on(side, value);
  value.record_stream(side);
  value.reset();
  EXPECT_NE(at::empty({1000}, device()).data_ptr(), address);
  order(side, current_stream());
  const auto again = at::empty({1000}, device());
  EXPECT_EQ(again.data_ptr(), address);
}

TEST(DeviceMemory, BelongsToTheStreamOfItsAllocation) {
  auto value = ones();
  const auto* const address = value.data_ptr();
  value.reset();
  const c10::StreamGuard on_side(side_stream());
  EXPECT_NE(at::empty({1000}, device()).data_ptr(), address);
}

TEST(DeviceMemory, HasNoValuesWhenItIsAllocated) {
  EXPECT_TRUE(at::empty({1000}, device()).isnan().all().item<bool>());
  auto value = ones();
  const auto* const address = value.data_ptr();
  value.reset();
  const auto again = at::empty({1000}, device());
  ASSERT_EQ(again.data_ptr(), address);
  EXPECT_TRUE(again.isnan().all().item<bool>());
}

TEST(DeviceMemory, IsCounted) {
  sim::reset_stats();
  const auto before = sim::stats().allocated;
  {
    const auto value = ones();
    EXPECT_EQ(sim::stats().allocated - before, 4096) << "in blocks of 512 bytes";
  }
  EXPECT_EQ(sim::stats().allocated, before);
  EXPECT_EQ(sim::stats().peak - before, 4096);
}

TEST(DeviceMemoryDeathTest, TheHostCannotTouchIt) {
  const auto value = ones();
  EXPECT_DEATH({ [[maybe_unused]] const volatile float element = *value.const_data_ptr<float>(); },
               "the host touched memory of the device");
}

TEST(PinnedMemory, ArrivesWhenTheHostHasWaited) {
  const auto value = ones();
  const auto host = pinned(1000, 5);
  EXPECT_TRUE(host.is_pinned());
  sim::reset_stats();
  host.copy_(value, /*non_blocking=*/true);
  EXPECT_EQ(sim::stats().all_host_waits(), 0);
  EXPECT_TRUE(host.isnan().all().item<bool>()) << "not at the call";
  current_stream().synchronize();
  EXPECT_EQ(host.sum().item<float>(), 1000);
}

TEST(PinnedMemory, IsNotWrittenWhileACopyWritesIt) {
  const auto value = ones();
  const auto host = pinned(1000, 5);
  host.copy_(value, /*non_blocking=*/true);
  host.data_ptr<float>()[999] = 5;
  current_stream().synchronize();
  expect_report("the host wrote to what 'aten::copy_ to the host'");
}

TEST(PinnedMemory, IsNotWrittenWhileACopyReadsIt) {
  const auto host = pinned(1000, 5);
  auto value = at::empty({999}, device());
  value.copy_(host.narrow(0, 0, 999), /*non_blocking=*/true);
  host.data_ptr<float>()[999] = 1;  // beside it
  EXPECT_EQ(host.sum().item<float>(), 5 * 999 + 1) << "it may be read";
  current_stream().synchronize();
  EXPECT_TRUE(sim::take_reports().empty());
  value.copy_(host.narrow(0, 0, 999), /*non_blocking=*/true);
  host.data_ptr<float>()[998] = 1;
  current_stream().synchronize();
  expect_report("the host wrote to what 'aten::copy_ from the host'");
}

TEST(PinnedMemory, IsUsedByOneCopyAfterTheOther) {
  const auto host = pinned(1000, 5);
  host.copy_(ones(), /*non_blocking=*/true);
  auto value = at::empty({1000}, device());
  value.copy_(host, /*non_blocking=*/true);
  host.copy_(value * 3, /*non_blocking=*/true);
  current_stream().synchronize();
  EXPECT_EQ(host.sum().item<float>(), 3000);
  EXPECT_EQ(value.cpu().sum().item<float>(), 1000);
}

TEST(PinnedMemory, IsUsedByCopiesOfTwoStreams) {
  const auto side = side_stream();
  const auto value = ones();
  const auto host = pinned(1000, 5);
  order(current_stream(), side);
  host.copy_(value, /*non_blocking=*/true);
  {
    const c10::StreamGuard on_side(side);
    const auto copy = host.to(device(), /*non_blocking=*/true);
    expect_report("read after write: 'aten::copy_ from the host'");
  }
  order(side, current_stream());
  current_stream().synchronize();
}

TEST(PinnedMemory, IsKeptUntilCopiesAreOver) {
  auto value = at::empty({1000}, device());
  {
    const auto host = pinned(1000, 5);
    value.copy_(host, /*non_blocking=*/true);
  }
  EXPECT_EQ(value.sum().item<float>(), 5000);
}

TEST(HostWaits, AreCountedByReason) {
  const auto value = ones();
  const auto host = at::zeros({1000});
  sim::reset_stats();
  value.sum().item<float>();
  host.copy_(value, /*non_blocking=*/true);
  host.copy_(value);
  value.copy_(host);
  value.nonzero();
  value.index({value > 0});
  current_stream().synchronize();
  c10::impl::VirtualGuardImpl(c10::kPrivateUse1).synchronizeDevice(0);
  const std::map<std::string, std::int64_t> expected = {{"item", 1},
                                                        {"copy that is not of pinned memory", 1},
                                                        {"blocking copy to the host", 1},
                                                        {"blocking copy from the host", 1},
                                                        {"operator aten::nonzero", 1},
                                                        {"operator aten::index", 1},
                                                        {"stream.synchronize", 1},
                                                        {"device.synchronize", 1}};
  EXPECT_EQ(sim::stats().host_waits, expected);
}

TEST(HostWaits, CanBeHeld) {
  std::vector<std::string> reasons;
  sim::before_host_wait([&](const std::string& reason) { reasons.push_back(reason); });
  ones().sum().item<float>();
  sim::before_host_wait({});
  EXPECT_EQ(reasons, std::vector<std::string>{"item"});
}

TEST(Time, AddsUp) {
  sim::set_cost({.launch = 10, .kernel = 1000, .kernel_byte = 1});
  const auto value = at::empty({1000}, device());
  const auto begin = sim::now();
  value.zero_();  // 4000 bytes
  EXPECT_EQ(sim::now() - begin, 10U) << "the host goes on";
  current_stream().synchronize();
  EXPECT_EQ(sim::now() - begin, 10U + 1000 + 4000);
  sim::set_cost({});
}

TEST(Time, OfTwoStreamsOverlaps) {
  const auto side = side_stream();
  sim::set_cost({.kernel = 1000});
  const auto value = at::empty({1000}, device());
  const auto other = at::empty({1000}, device());
  order(current_stream(), side);
  const auto begin = sim::now();
  value.zero_();
  {
    const c10::StreamGuard on_side(side);
    other.zero_();
  }
  side.synchronize();
  current_stream().synchronize();
  EXPECT_EQ(sim::now() - begin, 1000U);
  sim::set_cost({});
}

}  // namespace memory_test
