// Saving and loading on disks that are full, broken or slow, for one rank or all: one error on every rank that names the reason, what was
// there stays, nothing temporary does, and nothing hangs.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/commit.h"
#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "support/faulty_files.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/stored.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace faults_test {

namespace fs = std::filesystem;

using fsdp::testing::FaultyFiles;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::Training;

constexpr int kRanks = 2;
constexpr int kAll = -1;

struct Fault {
  std::string name;
  std::function<void(FaultyFiles&)> set;
  std::string reason;
  bool of_rank_0_only = false;  ///< Other ranks make no such call.
};

std::vector<Fault> faults_of_saving() {
  std::vector<Fault> faults;
  for (const std::int64_t space : {0, 1000, 5000}) {
    faults.push_back(
        {"space for " + std::to_string(space), [space](FaultyFiles& files) { files.space = space; }, "No space left on device"});
  }
  faults.push_back({"write", [](FaultyFiles& files) { files.pwrite_error = EIO; }, "Input/output error"});
  faults.push_back({"sync", [](FaultyFiles& files) { files.fsync_error = EIO; }, "Input/output error"});
  faults.push_back({"close", [](FaultyFiles& files) { files.close_error = EDQUOT; }, "Disk quota exceeded"});
  faults.push_back({"rename", [](FaultyFiles& files) { files.rename_error = EROFS; }, "Read-only file system", true});
  faults.push_back({"sync of the folder", [](FaultyFiles& files) { files.fsync_fails_after_rename = true; }, "Input/output error", true});
  return faults;
}

class Faults : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }
  std::vector<std::string> names() const { return fsdp::ckpt::list_folder(folder.path()); }
  fsdp::testing::TemporaryFolder folder;
};

/// Calls `save(target)` for each fault on each rank and all, to a new checkpoint and over the one that is there; it must throw.
void expect_failures(const std::string& folder, const fsdp::DeviceMesh& mesh, const std::function<void(const std::string& target)>& save) {
  const auto before = fsdp::testing::stored_tensors(folder + "/1");
  for (const auto& fault : faults_of_saving()) {
    for (int who = kAll; who < (fault.of_rank_0_only ? 1 : kRanks); ++who) {
      for (const std::string target : {"1", "2"}) {
        SCOPED_TRACE(fault.name + " of " + std::to_string(who) + ", to " + target);
        FaultyFiles files;
        if (who == kAll || who == mesh.rank()) fault.set(files);
        std::string message;
        {
          const fsdp::ckpt::ReplacedFileSystem replaced(files);
          message = message_of([&] { save(folder + "/" + target); });
        }
        EXPECT_TRUE(has(message, "the checkpoint " + folder + "/" + target + " could not be written:")) << message;
        EXPECT_TRUE(has(message, "rank " + std::to_string(std::max(who, 0)) + ": cannot")) << message;
        EXPECT_TRUE(has(message, fault.reason) && has(message, folder)) << message;
        mesh.barrier();  // Rank 0 removes what was written.
        EXPECT_EQ(fsdp::ckpt::list_folder(folder), std::vector<std::string>{"1"});
        fsdp::ckpt::verify_step(folder + "/1");
        mesh.barrier();  // Before the next save.
      }
    }
  }
  const auto after = fsdp::testing::stored_tensors(folder + "/1");
  ASSERT_EQ(after.size(), before.size());
  for (const auto& [name, tensor] : before) EXPECT_TRUE(same_bits(tensor, after.at(name))) << name;
}

TEST_F(Faults, ASaveThatFailsIsOneErrorAndLeavesWhatWasThere) {
  run_ranks(kRanks, [&] {
    Training run;
    run.train(0, 1);
    fsdp::save(path("1"), *run.model, *run.optimizer);
    run.train(1, 2);
    expect_failures(folder.path(), run.mesh, [&](const std::string& target) { fsdp::save(target, *run.model, *run.optimizer); });
    // The disk is well again.
    fsdp::save(path("2"), *run.model, *run.optimizer, {}, {.keep_last = 1});
    run.mesh.barrier();
    EXPECT_EQ(names(), std::vector<std::string>{"2"});
  });
}

// From each call that a save makes on: to a new folder, over the step that is there, and where another one is pruned.
TEST_F(Faults, ADiskMayBeFullFromAnyCallOn) {
  run_ranks(1, [&] {
    Training run;
    for (const char* step : {"1", "2"}) fsdp::save(path(step), *run.model, *run.optimizer);
    run.train(0, 1);
    for (const std::string target : {"2", "below/3", "3"}) {
      for (int calls = 0;; ++calls) {
        SCOPED_TRACE("to " + target + ", full after " + std::to_string(calls) + " calls");
        FaultyFiles files;
        files.calls_with_space = calls;
        std::string message;
        {
          const fsdp::ckpt::ReplacedFileSystem replaced(files);
          message = message_of([&] { fsdp::save(path(target), *run.model, *run.optimizer, {}, {.keep_last = 2}); });
        }
        if (message == "no error") break;
        fs::remove(path("below"));  // a folder on the way, if it is there
        EXPECT_TRUE(has(message, "No space left on device")) << message;
        if (has(message, "is complete, but older ones could not be removed")) break;
        EXPECT_TRUE(has(message, "the checkpoint " + path(target) + " could not be written:")) << message;
        ASSERT_EQ(names(), (std::vector<std::string>{"1", "2"}));
        ASSERT_LT(calls, 1000);
      }
      fsdp::ckpt::verify_step(path(target));
      fs::remove_all(path("below"));
      for (const auto& name : names()) fsdp::ckpt::verify_step(path(name));
    }
  });
}

TEST_F(Faults, ASaveBesideTrainingThatFailsToo) {
  run_ranks(kRanks, [&] {
    Training run;
    run.train(0, 1);
    fsdp::AsyncSaver saver(*run.model, run.optimizer.get());
    saver.save(path("1"));
    saver.wait();
    run.train(1, 2);
    int step = 2;
    expect_failures(folder.path(), run.mesh, [&](const std::string& target) {
      saver.save(target);
      run.train(step, step + 1);
      ++step;
      saver.wait();
    });
    saver.save(path("2"), {}, {.keep_last = 1});
    saver.wait();
    run.mesh.barrier();
    EXPECT_EQ(names(), std::vector<std::string>{"2"});
  });
}

// The checkpoint is whole, and what cannot be removed has a temporary name: the next one to be saved removes it.
TEST_F(Faults, WhatCannotBeRemovedIsNoCheckpoint) {
  run_ranks(kRanks, [&] {
    Training run;
    fsdp::save(path("1"), *run.model);
    run.train(0, 1);
    FaultyFiles files;
    files.unlink_error = EACCES;
    {
      const fsdp::ckpt::ReplacedFileSystem replaced(files);
      const auto message = message_of([&] { fsdp::save(path("1"), *run.model, {{"again", true}}); });
      EXPECT_TRUE(has(message, "the checkpoint " + path("1") + " is complete, but older ones could not be removed:")) << message;
      EXPECT_TRUE(has(message, "Permission denied")) << message;
      files.fsync_error = EIO;
      EXPECT_TRUE(has(message_of([&] { fsdp::save(path("2"), *run.model); }), "Input/output error"));
    }
    EXPECT_EQ(fsdp::latest(folder.path()), path("1"));
    fsdp::ckpt::verify_step(path("1"));
    EXPECT_TRUE(fsdp::load(path("1"), *run.model).extra.contains("again"));
    run.mesh.barrier();
    fsdp::save(path("2"), *run.model, {}, {.keep_last = 2});
    run.mesh.barrier();
    EXPECT_EQ(names(), (std::vector<std::string>{"1", "2"}));
  });
}

TEST_F(Faults, ShortAndInterruptedTransfersAreNoFaults) {
  run_ranks(kRanks, [&] {
    Training run;
    run.train(0, 1);
    FaultyFiles files;
    files.most_at_once = 1000;
    files.interrupts = true;
    const fsdp::ckpt::ReplacedFileSystem replaced(files);
    fsdp::save(path("1"), *run.model, *run.optimizer);
    const auto expected = run.handle->full_parameters();
    run.train(1, 2);
    fsdp::load(path("1"), *run.model, *run.optimizer);
    const auto loaded = run.handle->full_parameters();
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(loaded[i].second, expected[i].second)) << expected[i].first;
  });
}

TEST_F(Faults, ASlowDiskDoesNotBlockTraining) {
  run_ranks(kRanks, [&](int rank) {
    Training run;
    run.train(0, 1);
    FaultyFiles files;
    if (rank == 1) files.fsync_time = std::chrono::seconds(2);
    const fsdp::ckpt::ReplacedFileSystem replaced(files);
    fsdp::AsyncSaver saver(*run.model, run.optimizer.get());
    const auto begin = std::chrono::steady_clock::now();
    saver.save(path("1"));
    run.train(1, 2);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
    EXPECT_EQ(fsdp::latest(folder.path()), std::nullopt);
    saver.wait();
    EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
    EXPECT_EQ(fsdp::latest(folder.path()), path("1"));
  });
}

TEST_F(Faults, ALoadThatFailsIsOneErrorAndChangesNothing) {
  run_ranks(kRanks, [&](int rank) {
    Training run;
    run.train(0, 1);
    fsdp::save(path("1"), *run.model, *run.optimizer);
    run.train(1, 2);
    const auto before = run.handle->full_parameters();
    for (int who = kAll; who < kRanks; ++who) {
      FaultyFiles files;
      if (who == kAll || who == rank) files.pread_error = EIO;
      std::string message;
      {
        const fsdp::ckpt::ReplacedFileSystem replaced(files);
        message = message_of([&] { fsdp::load(path("1"), *run.model, *run.optimizer); });
      }
      EXPECT_TRUE(has(message, "nothing was loaded:\n  rank " + std::to_string(std::max(who, 0)) + ": ")) << message;
      EXPECT_TRUE(has(message, "Input/output error") && has(message, path("1"))) << message;
      const auto after = run.handle->full_parameters();
      for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(after[i].second, before[i].second)) << before[i].first;
    }
    EXPECT_TRUE(fsdp::load(path("1"), *run.model, *run.optimizer).rng);
  });
}

}  // namespace faults_test
