#include "comm/collectives/stream_times.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>

#include "events/event_ring.h"
#include "fsdp/fsdp.h"
#include "host_clock.h"
#include "support/device_mesh.h"
#include "support/stack.h"

// For how long collectives hold the device's stream, in its simulated time.
namespace stream_times_test {

using fsdp::testing::current_stream;
using fsdp::testing::device_mesh;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::stack_input;
using fsdp::testing::stack_units;

constexpr double kNsPerMs = 1e6;
constexpr std::uint64_t kCollective = 20'000;

/// The last step's simulated time, and the reports after the first step and after the last one.
struct Run {
  std::uint64_t step = 0;
  fsdp::StepReport first;
  fsdp::StepReport last;
};

Run train(const fsdp::DeviceMesh& mesh, int prefetch_depth, bool reports, std::uint64_t collective = kCollective) {
  const int rank = static_cast<int>(mesh.rank());
  sim::set_cost({.launch = 100, .kernel = 5'000, .collective = collective, .kernel_byte = 0.01});
  auto model = make_stack({.width = 64, .hidden = {64, 64, 64, 64, 64, 64}});
  model->to(mesh.device());
  const auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .prefetch_depth = prefetch_depth});
  fsdp::AdamW optimizer(*model);
  Run run;
  for (int step = 0; step < 3; ++step) {
    const auto x = stack_input(step, rank).to(mesh.device());
    current_stream(rank).synchronize();
    const auto begin = sim::now();
    model->forward(x).square().mean().backward();
    current_stream(rank).synchronize();
    run.step = sim::now() - begin;
    optimizer.step();
    optimizer.zero_grad();
    current_stream(rank).synchronize();
    if (reports && step == 0) run.first = fsdp::step_report(sharded);
  }
  if (reports) run.last = fsdp::step_report(sharded);
  return run;
}

TEST(StreamTimes, AReportTellsHowLongTheDeviceWaited) {
  run_ranks_on_device(2, [] {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    const auto before = train(mesh, 0, false);
    const auto run = train(mesh, 0, true);
    EXPECT_EQ(run.first.times.device_exposed_ms, -1) << "not measured before the first report";
    EXPECT_EQ(run.step, before.step) << "the host waits for nothing more";
    const auto free = train(mesh, 0, false, 0);
    // What the step takes less if data take no time. Each unit waits for itself.
    const auto exposed = static_cast<double>(run.step - free.step) / kNsPerMs;
    EXPECT_NEAR(run.last.times.device_exposed_ms, exposed, 0.1 * exposed);
    double sum = 0;
    for (const auto& waits : run.last.waits) {
      if (waits.device_ms < 0) continue;
      sum += waits.device_ms;
      EXPECT_TRUE(waits.operation == "all-gather" || waits.operation == "reduce-scatter") << waits.operation;
    }
    EXPECT_NEAR(sum, run.last.times.device_exposed_ms, 1e-9);
    EXPECT_NE(fsdp::to_line(run.last).find("; the device waited "), std::string::npos) << run.last;
    // Gathers that were read ahead hold no stream.
    EXPECT_LT(train(mesh, 2, true).last.times.device_exposed_ms, 0.5 * run.last.times.device_exposed_ms);
  });
}

TEST(StreamTimes, NothingIsMeasuredOnTheCpu) {
  fsdp::events::measure_streams();
  fsdp::comm::StreamTimes times;
  bool waited = false;
  times.measure(c10::kCPU, {}, [&] { waited = true; });
  EXPECT_TRUE(waited);
  EXPECT_FALSE(times.note());
}

}  // namespace stream_times_test
