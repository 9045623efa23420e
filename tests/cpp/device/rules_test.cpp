#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/collectives/coalesced_works.h"
#include "comm/collectives/native_communicator.h"
#include "comm/mesh/rendezvous.h"
#include "fsdp/fsdp.h"
#include "host_clock.h"
#include "optim/norm.h"
#include "support/device_mesh.h"
#include "support/device_row.h"
#include "support/stack.h"
#include "support/temporary_folder.h"

// Rules of the engine that only a device can break: writers and readers of main parameters on the host, and what overlaps.
namespace rules_test {

using fsdp::testing::current_stream;
using fsdp::testing::device_mesh;
using fsdp::testing::make_stack;
using fsdp::testing::OfAllRanks;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::Stack;
using fsdp::testing::stack_input;
using fsdp::testing::stack_units;
using fsdp::testing::TemporaryFolder;

fsdp::FSDPModule shard(Stack& model, const fsdp::DeviceMesh& mesh, fsdp::FullyShardOptions options = {}) {
  model->to(mesh.device());
  options.mesh = mesh;
  options.units = stack_units();
  return fsdp::fully_shard(*model, options);
}

at::Tensor loss_of(Stack& model, const fsdp::DeviceMesh& mesh, int step) {
  return model->forward(stack_input(step, mesh.rank()).to(mesh.device())).square().mean();
}

// Reductions of offloaded gradients end in pinned memory. Whoever reads it after backward does not wait again.
TEST(DeviceRules, OffloadedGradientsAreThereAfterBackward) {
  run_ranks_on_device(2, [] {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    auto model = make_stack();
    auto handle = shard(model, mesh, {.offload = fsdp::Offload::kAll});
    loss_of(model, mesh, 0).backward();
    for (const auto& gradient : handle.gradient_shards()) {
      if (!gradient.value.defined()) continue;
      EXPECT_TRUE(gradient.value.device().is_cpu());
      EXPECT_FALSE(gradient.value.isnan().any().item<bool>()) << gradient.name;
    }
  });
}

// A gather copies from pinned main parameters; whoever may write them waits for that. Without a backward, nothing else does.
TEST(DeviceRules, OffloadedParametersAreNotWrittenWhileAForwardCopiesThem) {
  run_ranks_on_device(2, [] {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    auto model = make_stack();
    auto handle = shard(model, mesh, {.offload = fsdp::Offload::kAll});
    fsdp::AdamW optimizer(*model, {.lr = 1e-2});
    loss_of(model, mesh, 0).backward();
    optimizer.step();
    const torch::NoGradGuard no_grad;
    const auto y = loss_of(model, mesh, 1);
    for (const auto& parameter : handle.parameter_shards()) parameter.value.add_(1);
    y.item<float>();
  });
}

// Whether a momentum is the first, the host knows.
TEST(DeviceRules, SGDIsNotWaitedFor) {
  run_ranks_on_device(2, [](int rank) {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    auto model = make_stack();
    auto handle = shard(model, mesh);
    fsdp::SGD optimizer(*model, {.lr = 1e-2, .momentum = 0.9, .dampening = 0.5});
    for (int step = 0; step < 3; ++step) {
      const auto loss = loss_of(model, mesh, step);
      sim::reset_stats(rank);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      EXPECT_EQ(sim::stats(rank).all_host_waits(), 0);
    }
  });
}

class Saving {
 public:
  /// Until release(), a thread that saves is held before it waits for its copies.
  explicit Saving(std::chrono::milliseconds longest) {
    sim::use_one_host_clock(true);  // The thread tells by a std::future.
    sim::before_host_wait([this, longest, trainer = std::this_thread::get_id()](const std::string& reason) {
      if (std::this_thread::get_id() == trainer || reason != "stream.synchronize") return;
      is_held_ = true;
      const auto end = std::chrono::steady_clock::now() + longest;
      while (!is_released_ && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  ~Saving() {
    release();
    sim::before_host_wait({});
    sim::use_one_host_clock(false);
  }
  Saving(const Saving&) = delete;
  Saving& operator=(const Saving&) = delete;

  void wait_until_held() const {
    while (!is_held_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void release() { is_released_ = true; }

 private:
  std::atomic<bool> is_held_ = false;
  std::atomic<bool> is_released_ = false;
};

/// Trains with saves, and loads one of them: the losses.
std::vector<double> losses_with_saves(const fsdp::DeviceMesh& mesh, const std::string& folder) {
  auto model = make_stack();
  auto handle = shard(model, mesh);
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});
  fsdp::AsyncSaver saver(*model, &optimizer);
  std::vector<double> losses;
  for (int step = 0; step < 4; ++step) {
    const auto loss = loss_of(model, mesh, step);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    // The device may be computing the update still.
    if (step % 2 == 1) saver.save(folder + "/" + std::to_string(step));
    losses.push_back(loss.item<double>());
  }
  saver.wait();
  fsdp::load(folder + "/1", *model, optimizer);
  const torch::NoGradGuard no_grad;
  losses.push_back(loss_of(model, mesh, 5).item<double>());
  return losses;
}

TEST(DeviceRules, SavesGoOnBesideTraining) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&] {
    sim::use_one_host_clock(true);  // The saving thread tells by a std::future.
    const auto on_cpu = losses_with_saves(fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}), folder.path() / "cpu");
    EXPECT_EQ(losses_with_saves(device_mesh({{"dp_shard", -1}}), folder.path() / "sim"), on_cpu);
  });
}

// [Writers wait for the reader]
TEST(DeviceRules, AnUpdateWaitsForTheCopyOfASave) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    auto model = make_stack();
    auto handle = shard(model, mesh);
    fsdp::AdamW optimizer(*model, {.lr = 1e-2});
    loss_of(model, mesh, 0).backward();
    optimizer.step();
    fsdp::AsyncSaver saver(*model, &optimizer);
    Saving saving(std::chrono::milliseconds(500));
    saver.save(folder.path() / "step");
    saving.wait_until_held();
    loss_of(model, mesh, 1).backward();
    optimizer.step();
    saving.release();
    saver.wait();
  });
}

TEST(DeviceRules, AnExceptionEndsWhatIsPostedTogether) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const OfAllRanks all(folder, rank, 2);
    auto own = at::full({2}, rank, sim::device(rank));
    auto gathered = at::empty({4}, own.options());
    try {
      fsdp::comm::CoalescedWorks works(*all.backend, /*several=*/true);
      works.add(all.backend->_allgather_base(gathered, own));
      throw std::runtime_error("planned failure");
    } catch (const std::runtime_error&) {
    }
    fsdp::comm::CoalescedWorks works(*all.backend, /*several=*/true);
    works.add(all.backend->_allgather_base(gathered, own));
    fsdp::comm::wait_all(works.end());
    EXPECT_EQ(gathered.sum().item<float>(), 2);
  });
}

// Hosts of three ranks: sums within a host, then between hosts, beside the computation.
TEST(DeviceRules, TwoLevelsRunBesideTheComputation) {
  constexpr int kRanks = 6;
  constexpr int kPerHost = 3;
  const TemporaryFolder folder;
  run_ranks_on_device(kRanks, [&](int rank) {
    OfAllRanks all(folder, rank, kRanks);
    fsdp::comm::NativeCommunicator communicator(all.row, all.backend, all.rendezvous.gloo_group(all.row, "control"), kPerHost);
    const auto options = at::TensorOptions().device(sim::device(rank)).dtype(at::kBFloat16);
    constexpr std::int64_t kNumel = 200;
    const auto unreduced = at::full({kRanks * kNumel}, rank + 1, options);
    const auto staging = at::empty({communicator.staging_numel(kNumel, at::kBFloat16)}, options);
    const auto out = at::zeros({kNumel}, options.dtype(at::kFloat));
    const auto busy = at::ones({20'000}, options);
    current_stream(rank).synchronize();
    sim::set_cost({.kernel = 2'000, .collective = 20'000, .kernel_byte = 1});
    const auto begin = sim::now();
    const std::vector<fsdp::comm::ReducePart> parts = {{.unreduced = unreduced, .staging = staging, .out = out}};
    const auto pending = communicator.reduce_scatter(parts, 1.0, {.operation = "reduce-scatter", .unit = "u"});
    const auto computed = busy.mul(3);
    const auto kernels = sim::stats(rank).all_kernels();
    pending->wait();
    current_stream(rank).synchronize();
    const auto time = sim::now() - begin;
    constexpr std::uint64_t kComputation = 2'000 + 2 * 2 * 20'000;
    // Two collectives and the sums of the first level take some 50,000, behind which is the last sum; the computation fits beside them.
    EXPECT_LT(time, kComputation + 20'000) << "of " << kernels << " kernels";
    EXPECT_EQ(out.sum().item<float>(), 21.0F * kNumel);
  });
}

// What travels in bf16 is scaled in fp32, though nothing has to be added up.
TEST(DeviceRules, ARankThatIsAloneScalesInFullPrecision) {
  run_ranks_on_device(1, [](int rank) {
    const fsdp::comm::Row row{.dim = "dp_shard", .rank = 0, .global_ranks = {0}, .world_size = 1};
    fsdp::comm::NativeCommunicator communicator(row, nullptr, nullptr);
    const auto values = at::randn({200}, at::kBFloat16);
    const auto unreduced = values.to(sim::device(rank));
    for (const bool accumulate : {false, true}) {
      const auto out = at::ones({200}, unreduced.options().dtype(at::kFloat));
      const std::vector<fsdp::comm::ReducePart> parts = {{.unreduced = unreduced, .staging = {}, .out = out, .accumulate = accumulate}};
      communicator.reduce_scatter(parts, 1.0 / 3, {.operation = "reduce-scatter", .unit = "u"})->wait();
      const auto scaled = values.to(at::kFloat) * static_cast<float>(1.0 / 3);
      EXPECT_TRUE(at::equal(out.cpu(), accumulate ? scaled + 1 : scaled)) << accumulate;
    }
  });
}

// Frozen parameters may have any dtype.
TEST(DeviceRules, NormsOfAnyDtypeAreThoseOfTheHost) {
  run_ranks_on_device(1, [](int rank) {
    std::vector<at::Tensor> here = {at::arange(5, at::kInt), at::full({3}, c10::complex<float>(3, 4)), at::ones({2}, at::kFloat)};
    std::vector<at::Tensor> there;
    for (const auto& tensor : here) there.push_back(tensor.to(sim::device(rank)));
    there.push_back(at::full({2}, 7.0));
    here.push_back(there.back());
    for (const double p : std::vector<double>{1, 2, INFINITY}) {
      const fsdp::optim::Norm norm(p, "test");
      EXPECT_DOUBLE_EQ(norm.of_pieces(there).item<double>(), norm.of_pieces(here).item<double>()) << p;
    }
  });
}

}  // namespace rules_test
