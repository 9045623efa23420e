#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/stream_capture.h"
#include "fsdp/fsdp.h"
#include "memory/slot_pool.h"
#include "support/device_mesh.h"
#include "support/stack.h"

// Graphs that are captured: the device's rules, and the library within them.
namespace capture_test {

using fsdp::DeviceMesh;
using fsdp::testing::current_stream;
using fsdp::testing::device_mesh;
using fsdp::testing::expect_report;
using fsdp::testing::order;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::side_stream;
using sim::device;

/// Before, torch tells nobody whether a stream is captured.
constexpr bool kTorchTells = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13;

/// Captures what is put on a stream of its own, which is current meanwhile.
class Capture {
 public:
  explicit Capture(int device = 0) : stream_(side_stream(device)), guard_(stream_) { sim::begin_capture(stream_); }
  ~Capture() { sim::end_capture(stream_); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  c10::Stream stream() const { return stream_; }

 private:
  const c10::Stream stream_;
  const c10::StreamGuard guard_;
};

at::Tensor ones() { return at::ones({1000}, device()); }

TEST(DeviceCapture, IsToldToWhoAsks) {
  if (!kTorchTells) GTEST_SKIP() << "it needs torch 2.13";
  std::optional<Capture> capture(std::in_place);
  const auto stream = capture->stream();
  EXPECT_TRUE(fsdp::is_capturing(stream));
  EXPECT_FALSE(fsdp::is_capturing(side_stream()));
  capture.reset();
  EXPECT_FALSE(fsdp::is_capturing(stream));
}

TEST(DeviceCapture, TheHostDoesNotWait) {
  const auto value = ones();
  current_stream().synchronize();
  const Capture capture;
  const auto twice = value * 2;
  EXPECT_TRUE(sim::take_reports().empty());
  twice.sum().item<float>();
  expect_report("capture: the host waits (item)");
  c10::Event after(c10::kPrivateUse1);
  after.record(capture.stream());
  after.query();
  expect_report("capture: the host asks for the end of what a graph records");
}

TEST(DeviceCapture, WaitsForNothingFromOutside) {
  const auto before = current_stream();
  c10::Event outside(c10::kPrivateUse1);
  outside.record(before);
  const Capture capture;
  outside.block(capture.stream());
  expect_report("is captured, and waits for what was recorded outside of its capture");
}

TEST(DeviceCapture, TakesInWhoWaitsForIt) {
  const auto value = ones();
  const auto side = side_stream();
  c10::Event within(c10::kPrivateUse1);
  current_stream().synchronize();
  {
    const Capture capture;
    value.mul_(2);
    within.record(capture.stream());
    within.block(side);
    {
      const c10::StreamGuard on_side(side);
      value.mul_(2);
    }
    EXPECT_EQ(sim::take_reports().size(), 0U);
    order(side, capture.stream());
  }
  EXPECT_EQ(value.sum().item<float>(), 4000) << "as if it had been run and waited for";
  within.block(side);
  expect_report("waits for what a graph recorded whose capture has ended");
}

TEST(DeviceCapture, EndsBehindAllThatTakePart) {
  const auto value = ones();
  const auto side = side_stream();
  current_stream().synchronize();
  {
    const Capture capture;
    order(capture.stream(), side);
    const c10::StreamGuard on_side(side);
    value.mul_(2);
  }
  expect_report("capture: it ends on ");
  side.synchronize();
}

/// Steps, the fourth of which is captured; its graph is run once. Their losses.
std::vector<double> losses(const DeviceMesh& mesh, const std::string& strategy, bool bf16, bool captured) {
  auto model = fsdp::testing::make_stack();
  model->to(mesh.device());
  fsdp::FullyShardOptions options{.mesh = mesh, .units = fsdp::testing::stack_units(), .placements = fsdp::Placements::from_name(strategy)};
  if (bf16) options.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16};
  fsdp::fully_shard(*model, options);
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});
  std::vector<at::Tensor> of_steps;
  for (int step = 0; step < 6; ++step) {
    auto x = fsdp::testing::stack_input(step, mesh.rank()).to(mesh.device());
    if (bf16) x = x.to(at::kBFloat16);
    // As whoever captures does.
    c10::impl::VirtualGuardImpl(c10::kPrivateUse1).synchronizeDevice(mesh.device().index());
    std::optional<Capture> capture;
    if (captured && step == 3) capture.emplace(mesh.device().index());
    const auto loss = model->forward(x).to(at::kFloat).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    of_steps.push_back(loss.detach());
  }
  std::vector<double> values;
  for (const auto& loss : of_steps) values.push_back(loss.item<double>());
  return values;
}

// [One stream at a time] The steps around it are on another stream, which a graph cannot wait for.
TEST(DeviceCapture, OfAStepWaitsForNoOtherStep) {
  if (!kTorchTells) GTEST_SKIP() << "it needs torch 2.13";
  run_ranks_on_device(2, [] {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    for (const char* const strategy : {"no_shard", "optim", "optim_grads", "optim_grads_params"}) {
      for (const bool bf16 : {false, true}) {
        SCOPED_TRACE(std::string(strategy) + (bf16 ? ", bf16" : ", fp32"));
        EXPECT_EQ(losses(mesh, strategy, bf16, /*captured=*/true), losses(mesh, strategy, bf16, /*captured=*/false));
        sim::expect_no_reports();
      }
    }
  });
}

TEST(DeviceSlots, GoBackBetweenSteps) {
  const auto before = sim::stats().allocated;
  fsdp::memory::Accounting accounting;
  fsdp::memory::SlotPool pool(device(), accounting);
  const auto step = [&] {  // Of blocks that a plan makes fewer.
    for (const std::int64_t bytes : {512, 1024}) {
      auto slot = pool.acquire(bytes, fsdp::memory::Kind::kGatheredParameters);
      auto beside = pool.acquire(3 * bytes, fsdp::memory::Kind::kUnreducedGradients);
    }
    EXPECT_GT(sim::stats().allocated, before) << "within a step they stay";
    pool.end_step();
    EXPECT_EQ(sim::stats().allocated, before);
    EXPECT_EQ(accounting.stats().slots.live, 0);
  };
  for (int i = 0; i < 4; ++i) step();
}

// Replays of the graph use them.
TEST(DeviceCapture, KeepsSlotsFromTheAllocator) {
  if (!kTorchTells) GTEST_SKIP() << "it needs torch 2.13";
  constexpr auto kKind = fsdp::memory::Kind::kGatheredParameters;
  constexpr std::int64_t kBytes = 512;
  const auto before = sim::stats().allocated;
  fsdp::memory::Accounting accounting;
  {
    fsdp::memory::SlotPool pool(device(), accounting);
    for (const bool captured : {true, false}) {
      std::optional<Capture> capture;
      if (captured) capture.emplace();
      auto slot = pool.acquire(kBytes, kKind);
      const void* const address = slot.data();
      slot.release();
      capture.reset();
      auto again = pool.acquire(kBytes, kKind);
      EXPECT_EQ(again.data(), address) << "the pool lends it still";
      again.release();
      pool.end_step();
      EXPECT_EQ(sim::stats().allocated - before, kBytes) << "that of the capture, which another one would be beside";
      EXPECT_EQ(pool.acquire(kBytes, kKind).data(), address) << "the pool lends what stays";
      pool.set_source({});  // All go back that may.
      EXPECT_EQ(sim::stats().allocated - before, kBytes);
    }
    EXPECT_EQ(accounting.stats().slots.live, kBytes);
  }
  EXPECT_EQ(sim::stats().allocated, before);
  EXPECT_EQ(accounting.stats().slots.live, 0);
}

}  // namespace capture_test
