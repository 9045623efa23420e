// [Differences need a base] What all ranks have of parameters that are gathered by differences, against a slow receiver that shares no code
// with the library, and when parameters are sent instead.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/exact_arithmetic.h"
#include "support/hosts.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/temporary_folder.h"

namespace gather_differences_test {

using fsdp::DeviceMesh;
using fsdp::Placements;
using fsdp::testing::has;
using fsdp::testing::Int4Receiver;
using fsdp::testing::line;
using fsdp::testing::message_of;
using fsdp::testing::NamedTensors;
using fsdp::testing::plane;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::Stack;

constexpr std::int64_t kBlock = 32;

/// A model whose matrices are gathered by differences, and what the slow receiver has of them.
class Trained {
 public:
  explicit Trained(fsdp::FullyShardOptions options, at::ScalarType compute = at::kFloat, bool hadamard = false)
      : compute_(compute), model(fsdp::testing::make_stack()) {
    const auto format = std::make_shared<const fsdp::GatherFormat>(fsdp::int4_differences({kBlock, hadamard}));
    options.units = fsdp::testing::stack_units();
    options.gather_format = [=](const std::string& name, const at::Tensor&) { return is_difference(name) ? format : nullptr; };
    if (compute != at::kFloat) options.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = compute};
    handle.emplace(fsdp::fully_shard(*model, std::move(options)));
    optimizer.emplace(*model, fsdp::AdamWOptions{.lr = 1e-2});
    for (const auto& [name, main] : handle->full_parameters()) receivers_.emplace_back(main, compute, kBlock, hadamard);
  }

  static bool is_difference(const std::string& name) { return name.ends_with("weight"); }
  fsdp::engine::MainParameters& main() const { return handle->engine()->main(); }
  at::Tensor loss(int step, int rank) { return model->forward(fsdp::testing::stack_input(step, rank).to(compute_)).square().mean(); }
  void step(int number, int rank) {
    loss(number, rank).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  /// The unsharded parameters, as the modules compute with them.
  NamedTensors whole() const {
    const torch::NoGradGuard no_grad;
    NamedTensors all;
    for (const auto& item : model->named_parameters()) all.emplace_back(item.key(), item.value().clone());
    return all;
  }
  /// An optimizer has stepped: they are received once.
  void expect_received(int line) {
    SCOPED_TRACE(line);
    const auto main = handle->full_parameters();
    const auto all = whole();
    for (std::size_t i = 0; i < all.size(); ++i) {
      receivers_[i].receive(main[i].second);
      const auto expected = is_difference(all[i].first) ? receivers_[i].values() : main[i].second.to(compute_);
      EXPECT_TRUE(same_bits(all[i].second, expected)) << all[i].first;
    }
  }
  /// The parameters were sent, and not differences to what ranks had.
  void expect_exact(int line) {
    SCOPED_TRACE(line);
    const auto main = handle->full_parameters();
    const auto all = whole();
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(same_bits(all[i].second, main[i].second.to(compute_))) << all[i].first;
      receivers_[i] = Int4Receiver(main[i].second, compute_, kBlock, /*hadamard=*/false);
    }
  }
  double error() const {
    const auto main = handle->full_parameters();
    const auto all = whole();
    double most = 0;
    for (std::size_t i = 0; i < all.size(); ++i) most = std::max(most, (all[i].second - main[i].second).abs().max().item<double>());
    return most;
  }
  /// The bytes that the next gathers of all units send.
  std::int64_t sent() {
    handle->reset_wire_stats();
    whole();
    return handle->wire_stats().all_gather_bytes;
  }

 private:
  at::ScalarType compute_;
  std::vector<Int4Receiver> receivers_;

 public:
  Stack model;
  std::optional<fsdp::FSDPModule> handle;
  std::optional<fsdp::AdamW> optimizer;
};

fsdp::FullyShardOptions with(const DeviceMesh& mesh, Placements placements = Placements::optim_grads()) {
  return {.mesh = mesh, .placements = placements};
}

void expect_received_everywhere(int rank, const DeviceMesh& mesh) {
  for (const auto compute : {at::kFloat, at::kBFloat16}) {
    for (const bool hadamard : {false, true}) {
      Trained trained(with(mesh), compute, hadamard);
      for (int step = 0; step < 4; ++step) {
        trained.step(step, rank);
        trained.expect_received(__LINE__);
      }
    }
  }
}

TEST(GatherDifferences, ArriveTheSameInSharedMemoryAndByMessages) {
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [](int rank) {
      for (const bool shared : {false, true}) {
        expect_received_everywhere(rank, fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = shared}));
      }
      expect_received_everywhere(rank, plane());
    });
  }
}

TEST(GatherDifferences, ArriveTheSameOnTwoHosts) {
  if (!fsdp::testing::can_pretend_hosts()) GTEST_SKIP() << "this system refuses mount namespaces";
  run_ranks(4, [](int rank) {
    fsdp::testing::pretend_hosts(rank, 2);
    expect_received_everywhere(rank, line());
  });
}

TEST(GatherDifferences, ErrorsDoNotAddUp) {
  run_ranks(2, [](int rank) {
    Trained trained(with(line()));
    for (int step = 0; step < 5; ++step) trained.step(step, rank);
    trained.optimizer->set_lr(0);
    double before = trained.error();
    EXPECT_GT(before, 1e-5);
    for (int step = 5; step < 8; ++step) {
      trained.step(step, rank);
      const double after = trained.error();
      EXPECT_LE(after, before / 13) << step;  // Half of the quantum of a difference that was at most so large.
      before = after;
    }
    EXPECT_LT(before, 1e-6);
  });
}

TEST(GatherDifferences, AreSentAfterUpdatesOnly) {
  const fsdp::testing::TemporaryFolder folder;
  run_ranks(2, [&](int rank) {
    Trained trained(with(line()), at::kBFloat16);
    const auto exact = trained.sent();
    trained.expect_exact(__LINE__);
    trained.step(0, rank);
    const auto differences = trained.sent();
    EXPECT_LT(differences, exact / 2);
    trained.expect_received(__LINE__);
    fsdp::save(folder.path() / "saved", *trained.model, *trained.optimizer);
    // Evaluations, and a second forward, gather nothing.
    {
      const torch::NoGradGuard no_grad;
      trained.handle->reset_wire_stats();
      trained.loss(1, rank);
      trained.loss(2, rank);
      EXPECT_EQ(trained.handle->wire_stats().all_gather_bytes, 0);
    }
    const std::vector<std::function<void()>> writes = {[&] {
                                                         const fsdp::SummonFullParams summoned(*trained.model);
                                                         const torch::NoGradGuard no_grad;
                                                         for (const auto& parameter : trained.model->parameters()) parameter.mul_(3);
                                                       },
                                                       [&] {
                                                         for (const auto& shard : trained.handle->parameter_shards()) shard.value.mul_(2);
                                                         trained.handle->main_parameters_changed();
                                                       },
                                                       [&] { fsdp::load(folder.path() / "saved", *trained.model, *trained.optimizer); }};
    for (const auto& write : writes) {
      trained.step(1, rank);
      write();
      EXPECT_EQ(trained.sent(), exact);
      trained.expect_exact(__LINE__);
      trained.step(2, rank);
      EXPECT_EQ(trained.sent(), differences);
      trained.expect_received(__LINE__);
    }
    // Writes that are dropped are none.
    {
      const fsdp::SummonFullParams summoned(*trained.model, {.writeback = false});
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : trained.model->parameters()) parameter.zero_();
    }
    trained.step(3, rank);
    EXPECT_EQ(trained.sent(), differences);
    trained.expect_received(__LINE__);
  });
}

TEST(GatherDifferences, ABlockThatIsNotFiniteIsNaNUntilParametersAreSent) {
  run_ranks(2, [](int rank) {
    Trained trained(with(line()));
    trained.whole();
    const auto first = [&] { return trained.whole()[0].second.flatten(); };  // entry.weight, 30 elements: one block
    const auto write = [&](float value) {
      if (rank == 0) trained.handle->parameter_shards()[0].value[3] = value;
      trained.main().changed();  // as an optimizer's step
    };
    for (const float value : {INFINITY, NAN}) {
      write(value);
      EXPECT_TRUE(first().isnan().all().item<bool>()) << value;
      EXPECT_FALSE(trained.whole()[2].second.isnan().any().item<bool>());
      write(1);
      EXPECT_TRUE(first().isnan().all().item<bool>()) << value;
      trained.handle->main_parameters_changed();
      EXPECT_EQ(first()[3].item<float>(), 1);
      EXPECT_FALSE(first().isnan().any().item<bool>());
    }
  });
}

TEST(GatherDifferences, AGatherThatAnExceptionEndedIsMadeAgain) {
  run_ranks(2, [](int rank) {
    Trained trained(with(line()));
    trained.step(0, rank);
    trained.expect_received(__LINE__);
    for (const std::size_t failing : {0, 2}) {
      trained.step(1, rank);
      trained.model->observer = [&](const std::string& event) {
        if (event == "forward blocks." + std::to_string(failing)) throw std::runtime_error("the program's own");
      };
      EXPECT_THROW(trained.loss(2, rank), std::runtime_error);  // The next unit's gather has begun.
      trained.handle->reset();
      trained.model->observer = nullptr;
      trained.expect_received(__LINE__);
    }
  });
}

TEST(GatherDifferences, ReachRanksThatSkipAUnit) {
  run_ranks(4, [](int rank) {
    Trained trained(with(line()));
    for (int step = 0; step < 4; ++step) {
      auto& block = *trained.model->blocks[1];
      const bool present = (step + rank) % 2 == 0;
      auto order = present ? std::vector<std::size_t>{0, 1, 2, 3} : std::vector<std::size_t>{0, 2, 3};
      fsdp::attend(block, present);
      fsdp::testing::stack_loss(trained.model, step, rank, order).backward();
      trained.optimizer->step();
      trained.optimizer->zero_grad();
      trained.expect_received(__LINE__);
    }
  });
}

TEST(GatherDifferences, NeedParametersThatStay) {
  run_ranks(2, [] {
    for (const auto& placements : {Placements::optim_grads_params(), Placements::no_shard()}) {
      const auto text = message_of([&] { Trained(with(line(), placements)); });
      EXPECT_TRUE(has(text, "unit '(root)'") && has(text, "optim_grads or optim")) << text;
    }
  });
}

TEST(GatherDifferences, OperatorsMayNotWriteToParameters) {
  run_ranks(2, [](int) {
    Trained trained(with(line()));
    const torch::NoGradGuard no_grad;
    const std::vector<std::function<void()>> writes = {[&] { trained.model->entry->weight.mul_(2); },
                                                       [&] { trained.model->entry->weight.data_ptr<float>()[0] = 2; }};
    for (const auto& write : writes) {
      trained.whole();
      trained.handle->unshard();
      const auto text = message_of(write);
      EXPECT_TRUE(has(text, "unit '(root)'") && has(text, "SummonFullParams")) << text;
    }
    trained.expect_exact(__LINE__);
    trained.main().changed();  // No operator's write is written back.
    trained.expect_received(__LINE__);
  });
}

TEST(GatherDifferences, RanksThatDisagreeGetAnError) {
  run_ranks(2, [](int rank) {
    Trained trained(with(line()));
    trained.step(0, rank);
    if (rank == 0) trained.main().send_values();
    const auto text = message_of([&] { trained.whole(); });
    EXPECT_TRUE(has(text, "all-gather of the root unit (192 bytes)") && has(text, "all-gather of the root unit (82 bytes)")) << text;
  });
}

}  // namespace gather_differences_test
