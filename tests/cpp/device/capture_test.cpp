#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/stream_capture.h"
#include "comm/communicator.h"
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
  explicit Capture(sim::Graph& graph, int device = 0) : graph_(graph), stream_(side_stream(device)), guard_(stream_) {
    graph_.begin_capture();
  }
  ~Capture() { graph_.end_capture(); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  c10::Stream stream() const { return stream_; }

 private:
  sim::Graph& graph_;
  const c10::Stream stream_;
  const c10::StreamGuard guard_;
};

void synchronize(int device = 0) {
  c10::impl::VirtualGuardImpl(c10::kPrivateUse1).synchronizeDevice(static_cast<c10::DeviceIndex>(device));
}

at::Tensor ones() { return at::ones({1000}, device()); }

TEST(DeviceCapture, IsToldToWhoAsks) {
  if (!kTorchTells) GTEST_SKIP() << "it needs torch 2.13";
  sim::Graph graph;
  std::optional<Capture> capture(std::in_place, graph);
  const auto stream = capture->stream();
  EXPECT_TRUE(fsdp::is_capturing(stream));
  EXPECT_FALSE(fsdp::is_capturing(side_stream()));
  capture.reset();
  EXPECT_FALSE(fsdp::is_capturing(stream));
}

TEST(DeviceCapture, TheHostDoesNotWait) {
  const auto value = ones();
  current_stream().synchronize();
  sim::Graph graph;
  const Capture capture(graph);
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
  sim::Graph graph;
  const Capture capture(graph);
  outside.block(capture.stream());
  expect_report("is captured, and waits for what was recorded outside of its capture");
}

TEST(DeviceCapture, TakesInWhoWaitsForIt) {
  const auto value = ones();
  const auto side = side_stream();
  c10::Event within(c10::kPrivateUse1);
  current_stream().synchronize();
  sim::Graph graph;
  {
    const Capture capture(graph);
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
  EXPECT_EQ(value.sum().item<float>(), 1000) << "nothing is computed";
  graph.replay();
  EXPECT_EQ(value.sum().item<float>(), 4000);
  within.block(side);
  expect_report("waits for what a graph recorded whose capture has ended");
}

TEST(DeviceCapture, IsNotOfTheDefaultStream) {
  synchronize();
  const auto outside = current_stream();
  sim::Graph graph;
  EXPECT_THROW(graph.begin_capture(), c10::Error);
  sim::Graph other;
  const Capture capture(other);
  order(capture.stream(), outside);
  expect_report("capture: the default stream waits for what a graph records, and cannot take part");
}

TEST(DeviceCapture, EndsBehindAllThatTakePart) {
  const auto value = ones();
  const auto side = side_stream();
  current_stream().synchronize();
  sim::Graph graph;
  {
    const Capture capture(graph);
    order(capture.stream(), side);
    const c10::StreamGuard on_side(side);
    value.mul_(2);
  }
  expect_report("capture: it ends on ");
  side.synchronize();
}

TEST(DeviceCapture, IsComputedByReplaysAlone) {
  const auto value = ones();
  synchronize();
  sim::Graph graph;
  at::Tensor sum, list_sum;
  {
    const Capture capture(graph);
    value.add_(at::scalar_tensor(2.0));  // whose value the graph keeps
    sum = (value * 2).sum();
    list_sum = at::_foreach_add({sum}, 1)[0];
  }
  EXPECT_EQ(value[0].item<float>(), 1);
  EXPECT_TRUE(std::isnan(sum.item<float>()));
  for (const float expected : {3.0F, 5.0F}) {
    graph.replay();
    EXPECT_EQ(value[0].item<float>(), expected);
    EXPECT_EQ(sum.item<float>(), 2000 * expected);
    EXPECT_EQ(list_sum.item<float>(), 2000 * expected + 1);
  }
  value.fill_(7);
  graph.replay();
  EXPECT_EQ(sum.item<float>(), 18000) << "what the input holds then";
}

TEST(DeviceCapture, ComesBehindWhatUsesItsMemory) {
  const auto value = ones();
  synchronize();
  sim::Graph graph;
  {
    const Capture capture(graph);
    value.mul_(2);
  }
  graph.replay();
  const c10::StreamGuard other(side_stream());
  graph.replay();
  const auto reports = sim::take_reports();
  ASSERT_EQ(reports.size(), 2U) << "it reads what the other one has written, and writes it";
  EXPECT_NE(reports[0].find("read after write: 'graph'"), std::string::npos) << reports[0];
  synchronize();
}

TEST(DeviceCapture, DrawsOtherNumbersEachTime) {
  synchronize();
  sim::Graph graph;
  at::Tensor drawn;
  {
    const Capture capture(graph);
    drawn = at::rand({4}, device());
  }
  graph.replay();
  const auto first = drawn.cpu();
  graph.replay();
  EXPECT_FALSE(at::equal(drawn.cpu(), first));
}

TEST(DeviceCapture, HasMemoryOfItsOwn) {
  synchronize();
  std::optional<sim::Graph> graph(std::in_place);
  const void* address = nullptr;
  c10::Stream stream = current_stream();
  {
    const Capture capture(*graph);
    stream = capture.stream();
    const auto within = ones();
    address = within.const_data_ptr();
    EXPECT_NE(ones().const_data_ptr(), address);
  }
  const c10::StreamGuard same_stream(stream);
  EXPECT_NE(ones().const_data_ptr(), address) << "freed, and the graph's still";
  graph.reset();
  EXPECT_EQ(ones().const_data_ptr(), address) << "the graph has gone";
}

TEST(DeviceCapture, NobodyAllocatesBesideIt) {
  synchronize();
  sim::Graph graph;
  const auto outside = current_stream();
  const Capture capture(graph);
  const c10::StreamGuard on_outside(outside);
  const auto memory = at::empty({10}, device());
  expect_report("capture: memory is allocated for the default stream, which is not captured, while a graph is");
}

TEST(DeviceCapture, UsesNothingThatWasFreed) {
  for (const bool freed : {false, true}) {
    auto value = ones();
    synchronize();
    sim::Graph graph;
    {
      const Capture capture(graph);
      value.mul_(2);
    }
    graph.replay();
    synchronize();
    if (freed) value = ones();  // which may well lie there
    graph.replay();
    if (freed) expect_report("replay: the graph uses memory that was freed after its capture began");
    synchronize();
  }
}

TEST(DeviceCapture, RepeatsCollectives) {
  run_ranks_on_device(2, [](int rank) {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    const auto row = mesh.communicator("dp_shard");
    const auto own = at::full({2}, rank + 1.0, sim::device(rank));
    const auto all = at::zeros({4}, own.options());
    synchronize(rank);
    sim::Graph graph;
    {
      const Capture capture(graph, rank);
      own.mul_(10);
      const fsdp::comm::GatherPart part{.full = all, .shard = own};
      row->all_gather({&part, 1}, {.operation = "all-gather", .unit = "it"})->wait();
      all.add_(1);
    }
    EXPECT_EQ(all.sum().item<float>(), 0);
    for (const float times : {10.0F, 100.0F}) {
      graph.replay();
      EXPECT_EQ(all.sum().item<float>(), 6 * times + 4);
    }
  });
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
  sim::Graph graph;
  for (int step = 0; step < 6; ++step) {
    auto x = fsdp::testing::stack_input(step, mesh.rank()).to(mesh.device());
    if (bf16) x = x.to(at::kBFloat16);
    // As whoever captures does.
    synchronize(mesh.device().index());
    std::optional<Capture> capture;
    if (captured && step == 3) capture.emplace(graph, mesh.device().index());
    const auto loss = model->forward(x).to(at::kFloat).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    of_steps.push_back(loss.detach());
    if (capture) {
      capture.reset();
      graph.replay();
      synchronize(mesh.device().index());
    }
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

TEST(DeviceSlots, GoBackAtOnce) {
  const auto before = sim::stats().allocated;
  fsdp::memory::Accounting accounting;
  fsdp::memory::SlotPool pool(device(), accounting);
  const auto step = [&] {
    for (const std::int64_t bytes : {512, 1024}) {
      auto slot = pool.acquire(bytes, fsdp::memory::Kind::kGatheredParameters);
      auto beside = pool.acquire(3 * bytes, fsdp::memory::Kind::kUnreducedGradients);
      EXPECT_GT(sim::stats().allocated, before);
    }
    EXPECT_EQ(sim::stats().allocated, before) << "within a step, too";
    pool.end_step();
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
    sim::Graph graph;
    fsdp::memory::SlotPool pool(device(), accounting);
    for (const bool captured : {true, false}) {
      std::optional<Capture> capture;
      if (captured) capture.emplace(graph);
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
