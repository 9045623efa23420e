#include <gtest/gtest.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>

#include "fsdp/fsdp.h"
#include "support/device_mesh.h"
#include "support/stack.h"

// The engine's ranges under emit_nvtx. What torch calls NVTX by is replaced.
namespace profiler_test {

using fsdp::testing::device_mesh;
using fsdp::testing::run_ranks_on_device;

/// Remembers the ranges that begin.
class Nvtx final : public torch::profiler::impl::ProfilerStubs {
 public:
  void record(c10::DeviceIndex*, torch::profiler::impl::ProfilerVoidEventStub*, std::int64_t*) const override {}
  float elapsed(const torch::profiler::impl::ProfilerVoidEventStub*, const torch::profiler::impl::ProfilerVoidEventStub*) const override {
    return 0;
  }
  void mark(const char*) const override {}
  void rangePush(const char* name) const override {
    const std::lock_guard lock(mutex_);
    begun_.insert(name);
    ++open_;
  }
  void rangePop() const override {
    const std::lock_guard lock(mutex_);
    --open_;
  }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)>) const override {}
  void synchronize() const override {}

  int open() const { return open_; }
  bool has(const std::string& name) const {  // behind which torch writes more
    return std::any_of(begun_.begin(), begun_.end(), [&](const std::string& one) { return one.starts_with(name); });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::set<std::string> begun_;
  mutable int open_ = 0;
};

TEST(DeviceProfiler, RangesBecomeNvtxs) {
  run_ranks_on_device(2, [] {
    static Nvtx nvtx;
    torch::profiler::impl::registerCUDAMethods(&nvtx);
    const auto mesh = device_mesh({{"dp_shard", -1}});
    auto model = fsdp::testing::make_stack();
    model->to(mesh.device());
    fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::testing::stack_units()});
    fsdp::AdamW optimizer(*model);
    const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::NVTX);
    torch::autograd::profiler::enableProfiler(config, {});
    model->forward(fsdp::testing::stack_input(0, mesh.rank()).to(mesh.device())).square().mean().backward();
    optimizer.step();
    torch::autograd::profiler::disableProfiler();
    for (const char* const name : {"FSDP::all_gather (blocks.0)", "FSDP::post_backward_reduce (blocks.0)", "libfsdp::gathered_parameters",
                                   "libfsdp::unreduced_gradients", "libfsdp::main_gradients", "libfsdp::optimizer_state"}) {
      EXPECT_TRUE(nvtx.has(name)) << name;
    }
    EXPECT_EQ(nvtx.open(), 0);
  });
}

}  // namespace profiler_test
