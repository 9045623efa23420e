// What a run needs beside its model, and what it hears of a save and a load: scalers, loaders, lists, bytes; phases.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "fsdp/error.h"
#include "fsdp/fsdp.h"
#include "state/snapshot.h"
#include "support/edited_checkpoint.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/python_peer.h"
#include "support/stack.h"
#include "support/temporary_folder.h"
#include "support/training.h"
#include "test_paths.h"

namespace run_state_test {

using fsdp::ExtraBytes;
using fsdp::ExtraList;
using fsdp::ExtraState;
using fsdp::Phase;
using fsdp::testing::adamw;
using fsdp::testing::has;
using fsdp::testing::make;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::Training;

class RunState : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }
  fsdp::testing::TemporaryFolder folder;
};

ExtraState of_rank(int rank) {
  ExtraState state = {{"position", std::int64_t{100 + rank}}, {"order", at::arange(rank, 5)}};
  if (rank == 0) state["only here"] = true;
  return state;
}

std::string all_bytes() {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  return bytes;
}

ExtraList some_list() { return {{std::int64_t{1}, 2.5, std::string("three"), true, ExtraList{{ExtraBytes{"four"}}}}}; }

TEST_F(RunState, HasTheTypesOfPythons) {
  run_ranks(2, [&](int rank) {
    const auto is_block = [](const std::string& name) { return name.starts_with("blocks."); };
    Training run({.granularity = fsdp::whole_matrices(is_block)},
                 make<fsdp::Muon>(fsdp::MuonOptions{.lr = 0.02,
                                                    .weight_decay = 0.1,
                                                    .adjust_lr = fsdp::AdjustLR::kMatchRMSAdamW,
                                                    .ns_steps = 3,
                                                    .matrices = is_block,
                                                    .adamw = {.lr = 1e-3}}));
    run.train(0, 1);
    const fsdp::GradScaler scaler({.init_scale = 1024, .growth_interval = 7});
    fsdp::save(path("1"), *run.model, *run.optimizer, {{"bytes", ExtraBytes{all_bytes()}}, {"list", some_list()}},
               {.rank_extra = of_rank(rank), .grad_scaler = &scaler});
  });
  fsdp::testing::run_peer(fsdp::testing::kStatePeer, {"types", path("1")});
}

TEST_F(RunState, ComesBack) {
  for (const bool is_asynchronous : {false, true}) {
    const auto step = path(is_asynchronous ? "async" : "sync");
    run_ranks(2, [&](int rank) {
      Training run;
      run.train(0, 1);
      fsdp::GradScaler scaler({.init_scale = 4096, .growth_interval = 3});
      const ExtraState extra = {{"bytes", ExtraBytes{all_bytes()}}, {"list", some_list()}};
      const fsdp::SaveOptions options = {.rank_extra = of_rank(rank), .grad_scaler = &scaler};
      if (is_asynchronous) {
        fsdp::AsyncSaver saver(*run.model, run.optimizer.get());
        saver.save(step, extra, options);
        scaler.update(2);
        saver.wait();
      } else {
        fsdp::save(step, *run.model, *run.optimizer, extra, options);
      }
      fsdp::GradScaler other;
      const auto loaded = fsdp::load(step, *run.model, *run.optimizer, {.grad_scaler = &other});
      EXPECT_EQ(other.get_scale(), 4096);
      EXPECT_EQ(other.state_dict().growth_interval, 3);
      EXPECT_EQ(std::get<ExtraBytes>(loaded.extra.at("bytes")).data, all_bytes());
      const auto& list = std::get<ExtraList>(loaded.extra.at("list")).items;
      ASSERT_EQ(list.size(), 5U);
      EXPECT_EQ(std::get<std::int64_t>(list[0]), 1);
      EXPECT_EQ(std::get<double>(list[1]), 2.5);
      EXPECT_EQ(std::get<std::string>(list[2]), "three");
      EXPECT_TRUE(std::get<bool>(list[3]));
      EXPECT_EQ(std::get<ExtraBytes>(std::get<ExtraList>(list[4]).items.at(0)).data, "four");
      EXPECT_EQ(std::get<std::int64_t>(loaded.rank_extra.at("position")), 100 + rank);
      EXPECT_TRUE(torch::equal(std::get<at::Tensor>(loaded.rank_extra.at("order")), at::arange(rank, 5)));
      EXPECT_EQ(loaded.rank_extra.contains("only here"), rank == 0);
    });
    run_ranks(3, [&] {
      Training run;
      const auto loaded = fsdp::load(step, *run.model, *run.optimizer);
      EXPECT_TRUE(loaded.rank_extra.empty());
      const auto all = fsdp::read_rank_extra(step);
      ASSERT_EQ(all.size(), 2U);
      for (int rank = 0; rank < 2; ++rank)
        EXPECT_EQ(std::get<std::int64_t>(all[static_cast<std::size_t>(rank)].at("position")), 100 + rank);
    });
  }
}

TEST_F(RunState, WhatIsMissingOrHasNoMeaningIsAnError) {
  run_ranks(2, [&] {
    Training run;
    fsdp::GradScaler scaler({.init_scale = 4096});
    fsdp::save(path("none"), *run.model);
    const auto missing = message_of([&] { fsdp::load(path("none"), *run.model, {.grad_scaler = &scaler}); });
    EXPECT_TRUE(has(missing, "missing in the checkpoint:\n    scaler.scale")) << missing;
    fsdp::load(path("none"), *run.model, {.strict = false, .grad_scaler = &scaler});
    EXPECT_EQ(scaler.get_scale(), 4096);
    fsdp::save(path("part"), *run.model, {}, {.grad_scaler = &scaler});
    if (run.mesh.rank() == 0) fsdp::testing::remove_item(path("part"), "scaler.growth_factor");
    run.mesh.barrier();
    const auto part = message_of([&] { fsdp::load(path("part"), *run.model, {.grad_scaler = &scaler}); });
    EXPECT_TRUE(has(part, "has no 'scaler.growth_factor'")) << part;
    const ExtraState undefined = {{"x", ExtraList{{std::int64_t{1}, at::Tensor()}}}};
    const auto list = message_of([&] { fsdp::save(path("list"), *run.model, undefined); });
    EXPECT_TRUE(has(list, "extra state 'extra.x.1' is an undefined tensor")) << list;
  });
}

// The state of another kind of generator, on one rank: found before anything is assigned.
TEST_F(RunState, AStateThatItsGeneratorRefusesIsAnErrorOnEveryRank) {
  run_ranks(2, [&] {
    Training run;
    fsdp::save(path("1"), *run.model, {{"wrong", at::zeros({7}, at::kByte)}});
    run.mesh.barrier();
    if (run.mesh.rank() == 0) {
      fsdp::testing::remove_item(path("1"), "fsdp.rng.1");
      fsdp::testing::rename_items(path("1"), [](const std::string& name) { return name == "extra.wrong" ? "fsdp.rng.1" : name; });
    }
    run.mesh.barrier();
    Training other({}, adamw(), 12);
    const auto before = other.handle->full_parameters();
    const auto message = message_of([&] { fsdp::load(path("1"), *other.model); });
    EXPECT_TRUE(has(message, "nothing was loaded:\n  rank 1: " + path("1") + ": 'fsdp.rng.1' is no state of this generator")) << message;
    const auto after = other.handle->full_parameters();
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i].second, after[i].second)) << before[i].first;
    EXPECT_EQ(message_of([&] { fsdp::load(path("1"), *other.model, {.rng = false}); }), "no error");
  });
}

TEST_F(RunState, WritingBesideTrainingHasALowerPriority) {
  run_ranks(2, [&] {
    Training run;
    run.train(0, 1);
    const auto niceness = [] { return getpriority(PRIO_PROCESS, 0); };  // of the calling thread
    std::map<Phase, int> seen;
    const fsdp::SaveOptions options{.on_phase = [&](const fsdp::PhaseReport& report) { seen[report.phase] = niceness(); }};
    const int usual = niceness();
    const int lower = std::min(usual + 10, 19);
    fsdp::save(path("1"), *run.model, *run.optimizer, {}, options);
    EXPECT_EQ(seen.at(Phase::kWrite), usual);
    fsdp::AsyncSaver saver(*run.model, run.optimizer.get());
    for (const auto* name : {"2", "3"}) {
      saver.save(path(name), {}, options);
      saver.wait();
      EXPECT_EQ(seen.at(Phase::kCollect), usual);
      EXPECT_EQ(seen.at(Phase::kWrite), lower);
      EXPECT_EQ(seen.at(Phase::kCommit), lower);
      EXPECT_EQ(niceness(), usual);
    }
  });
}

TEST_F(RunState, PhasesAreReported) {
  run_ranks(2, [&] {
    Training run;
    run.train(0, 1);
    std::vector<fsdp::PhaseReport> reports;
    const auto keep = [&](const fsdp::PhaseReport& report) { reports.push_back(report); };
    const auto expect = [&](const std::vector<Phase>& phases) {
      ASSERT_EQ(reports.size(), phases.size());
      for (std::size_t i = 0; i < phases.size(); ++i) {
        EXPECT_EQ(reports[i].phase, phases[i]);
        EXPECT_GE(reports[i].seconds, 0);
      }
    };
    const std::vector<Phase> of_save = {Phase::kCollect, Phase::kWrite, Phase::kCommit, Phase::kPrune};
    fsdp::save(path("1"), *run.model, *run.optimizer, {}, {.on_phase = keep});
    expect(of_save);
    // Parameters and two moments of 4 bytes each, half of them here; headers are not values.
    std::int64_t elements = 0;
    for (const auto& parameter : run.model->parameters()) elements += parameter.numel();
    EXPECT_GT(reports[0].bytes, elements * 12 / 2 * 9 / 10);
    const auto file = path("1") + "/__" + std::to_string(run.mesh.rank()) + "_0.distcp";
    EXPECT_EQ(reports[1].bytes, static_cast<std::int64_t>(std::filesystem::file_size(file)));
    reports.clear();
    fsdp::load(path("1"), *run.model, *run.optimizer, {.on_phase = keep});
    expect({Phase::kOpen, Phase::kCheck, Phase::kAssign});
    EXPECT_GT(reports[1].bytes, elements * 12 / 2 * 9 / 10);
    EXPECT_EQ(reports[2].bytes, reports[1].bytes);
    reports.clear();
    fsdp::AsyncSaver saver(*run.model, run.optimizer.get());
    saver.save(path("2"), {}, {.on_phase = keep});
    saver.wait();
    expect(of_save);
  });
}

// A GPU's generator is kept beside the CPU's.
TEST(SavedGenerators, AreThoseOfTheDevice) {
  auto cpu = fsdp::state::generators_of(at::kCPU);
  ASSERT_EQ(cpu.size(), 1U);
  EXPECT_EQ(cpu[0].key(3), "fsdp.rng.3");
  const auto before = cpu[0].state();
  const auto drawn = torch::randn({3});
  cpu[0].set_state(before);
  EXPECT_TRUE(torch::equal(torch::randn({3}), drawn));
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  auto both = fsdp::state::generators_of(at::Device(at::kCUDA, 0));
  ASSERT_EQ(both.size(), 2U);
  EXPECT_EQ(both[1].key(3), "fsdp.cuda_rng.3");
  const auto state = both[1].state();
  const auto on_gpu = torch::randn({3}, at::kCUDA);
  both[1].set_state(state);
  EXPECT_TRUE(torch::equal(torch::randn({3}, at::kCUDA), on_gpu));
}

}  // namespace run_state_test
