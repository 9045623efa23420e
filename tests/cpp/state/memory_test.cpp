// Checkpoints in the memory of hosts: what a restart finds, from where, and on how many ranks. Ranks with folders of their own stand for
// hosts.

#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/memory_folder.h"
#include "comm/launch/launch.h"
#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "fsdp/save_load.h"
#include "support/checkpoint_test.h"
#include "support/collected_warnings.h"
#include "support/faulty_files.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stored.h"
#include "support/training.h"

namespace memory_test {

namespace fs = std::filesystem;

using fsdp::AsyncSaver;
using fsdp::testing::flip_bit;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::on_rank_0;
using fsdp::testing::run_ranks;
using fsdp::testing::Training;

const std::string kThisHost = "memory of this host";

class Memory : public fsdp::testing::CheckpointTest {
 protected:
  std::string host(int number) const { return path("host" + std::to_string(number) + "/run"); }
  /// The folder of a rank, if so many ranks are on each host.
  std::string memory(int rank, int per_host) const { return host(rank / per_host); }
  std::string disk() const { return path("disk"); }

  static fsdp::ExtraState at(std::int64_t step) { return {{"step", step}}; }
  static std::string name(std::int64_t step) { return "step-" + std::to_string(step); }

  /// Trains steps 1 to `last`, and saves each in memory; those of `on_disk` also there.
  void train_and_save(Training& run, int rank, int per_host, int last, const std::vector<int>& on_disk = {}) const {
    AsyncSaver saver(*run.model, run.optimizer.get(), {.memory = memory(rank, per_host)});
    for (int step = 1; step <= last; ++step) {
      run.train(step - 1, step);
      const fsdp::SaveOptions own = {.rank_extra = {{"rank", std::int64_t{rank}}}};
      if (std::find(on_disk.begin(), on_disk.end(), step) != on_disk.end()) {
        saver.save(disk() + "/" + name(step), at(step), own);
      } else {
        saver.save_in_memory(name(step), at(step), own);
      }
    }
    saver.wait();
  }

  /// All of a model and its optimizer, whole.
  std::map<std::string, at::Tensor> state_of(Training& run, const std::string& as) const {
    fsdp::save(path(as), *run.model, *run.optimizer, {}, {.rng = false});
    auto state = fsdp::testing::stored_tensors(path(as));
    run.mesh.barrier();
    return state;
  }

  std::optional<fsdp::Loaded> load(Training& run, int rank, int per_host) const {
    return fsdp::load_latest(memory(rank, per_host), disk(), *run.model, *run.optimizer);
  }
  static std::int64_t step_of(const std::optional<fsdp::Loaded>& loaded) { return loaded ? loaded->get<std::int64_t>("step") : 0; }

  static std::int64_t bytes_in(const std::string& folder) {
    std::uintmax_t bytes = 0;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) bytes += entry.is_regular_file() ? entry.file_size() : 0;
    return static_cast<std::int64_t>(bytes);
  }

  static std::vector<std::string> names_in(const std::string& folder) { return fsdp::ckpt::list_folder(folder); }
};

TEST_F(Memory, HoldsTwoStepsOfOneHostWhichAreCheckpoints) {
  run_ranks(2, [&](int rank) {
    Training run;
    train_and_save(run, rank, 2, 4, {3});
    EXPECT_EQ(names_in(host(0)), (std::vector<std::string>{".fsdp-job", "step-3", "step-4"}));
    run.mesh.barrier();
    Training loaded({}, fsdp::testing::adamw(), 12);
    const auto found = load(loaded, rank, 2);
    EXPECT_EQ(step_of(found), 4);
    EXPECT_EQ(found->origin, kThisHost);
    EXPECT_EQ(found->path, host(0) + "/step-4");
    EXPECT_TRUE(found->skipped.empty());
    EXPECT_TRUE(found->rng);
    EXPECT_EQ(fsdp::get_extra<std::int64_t>(found->rank_extra, "rank"), rank);
    run.train(4, 6);
    loaded.train(4, 6);
    fsdp::testing::expect_same_bits(state_of(run, "a"), state_of(loaded, "b"));
    // Of equally new steps, the one in memory; if the memory is lost, the one of the disk.
    on_rank_0(run.mesh, [&] { fs::remove_all(host(0) + "/step-4"); });
    EXPECT_EQ(load(loaded, rank, 2)->path, host(0) + "/step-3");
    on_rank_0(run.mesh, [&] { fs::remove_all(host(0)); });
    EXPECT_EQ(load(loaded, rank, 2)->path, disk() + "/step-3");
    EXPECT_EQ(load(loaded, rank, 2)->origin, disk());
  });
}

// Also where it kept nothing of the folder, and on fewer ranks and more.
TEST_F(Memory, OfALostHostIsOnItsNeighbour) {
  std::map<int, std::map<std::string, at::Tensor>> expected;
  run_ranks(4, [&](int rank) {
    Training run;
    train_and_save(run, rank, 2, 3, {1});
    EXPECT_EQ(names_in(host(0) + "/step-3"), (std::vector<std::string>{".fsdp-checksums", ".fsdp-owner", ".metadata", "__0_0.distcp",
                                                                       "__1_0.distcp", "__2_0.distcp", "__3_0.distcp"}));
    fsdp::save(path("reference"), *run.model, *run.optimizer);
    // Nothing may be read from the disk.
    on_rank_0(run.mesh, [&] { fs::resize_file(disk() + "/step-1/__0_0.distcp", 10); });
  });
  for (const int ranks : {4, 3, 2, 4}) {
    fs::remove_all(path("host1"));
    run_ranks(ranks, [&](int rank) {
      Training run({}, fsdp::testing::adamw(), 12);
      const auto loaded = load(run, rank, 2);
      EXPECT_EQ(step_of(loaded), 3);
      const bool is_lost = rank >= 2;
      EXPECT_EQ(loaded->origin == kThisHost, !is_lost) << loaded->origin;
      EXPECT_EQ(has(loaded->origin, kThisHost + ", and ") && has(loaded->origin, " bytes from that of other hosts"), is_lost);
      EXPECT_EQ(loaded->rng, ranks == 4);
      run.mesh.barrier();
      if (is_lost) {
        EXPECT_TRUE(names_in(host(1)).empty()) << "what was received stays only for the load";
      }
      Training reference({}, fsdp::testing::adamw(), 13);
      fsdp::load(path("reference"), *reference.model, *reference.optimizer);
      fsdp::testing::expect_same_bits(state_of(run, "a"), state_of(reference, "b"));
      if (ranks < 4) return;
      run.train(3, 5);
      reference.train(3, 5);
      fsdp::testing::expect_same_bits(state_of(run, "a"), state_of(reference, "b"));
    });
  }
}

TEST_F(Memory, OfTwoNeighboursThatAreLostIsOnTheDisk) {
  run_ranks(3, [&](int rank) {
    Training run;
    train_and_save(run, rank, 1, 4, {2});
    on_rank_0(run.mesh, [&] {
      fs::remove_all(host(1));
      fs::remove_all(host(2));
    });
    fsdp::testing::CollectedWarnings warnings;
    const auto loaded = load(run, rank, 1);
    EXPECT_EQ(step_of(loaded), 2);
    EXPECT_EQ(loaded->origin, disk());
    ASSERT_EQ(loaded->skipped.size(), 2);
    EXPECT_EQ(loaded->skipped[0], memory(rank, 1) + "/step-4: no host has __1_0.distcp in its memory");
    EXPECT_TRUE(has(warnings.text(), "and not what is newer:")) << warnings.text();
  });
}

// With distance 2, the neighbour is lost with the host, and the copy is not.
TEST_F(Memory, OfTwoNeighboursIsElsewhereWithAGreaterDistance) {
  run_ranks(4, [&](int rank) {
    Training run;
    {
      AsyncSaver saver(*run.model, run.optimizer.get(), {.memory = memory(rank, 1), .distance = 2});
      saver.save_in_memory("step-1", at(1));
      saver.wait();
    }
    on_rank_0(run.mesh, [&] {
      fs::remove_all(host(0));
      fs::remove_all(host(1));
    });
    const auto loaded = load(run, rank, 1);
    EXPECT_EQ(step_of(loaded), 1);
    // No host has all files, of which each has values that all ranks read.
    EXPECT_TRUE(has(loaded->origin, kThisHost + ", and ")) << loaded->origin;
  });
}

TEST_F(Memory, ADamagedFileIsAsAbsent) {
  run_ranks(2, [&](int rank) {
    Training run;
    train_and_save(run, rank, 1, 2);
    on_rank_0(run.mesh, [&] { flip_bit(host(1) + "/step-2/__1_0.distcp", 4000, 1); });
    Training other({}, fsdp::testing::adamw(), 12);
    const auto loaded = load(other, rank, 1);
    EXPECT_EQ(step_of(loaded), 2);
    ASSERT_EQ(loaded->skipped.size(), 1);
    EXPECT_TRUE(has(loaded->skipped[0], host(1) + "/step-2: __1_0.distcp has the checksum")) << loaded->skipped[0];
    EXPECT_EQ(loaded->origin == kThisHost, rank == 0) << loaded->origin;
    fsdp::testing::expect_same_bits(state_of(run, "a"), state_of(other, "b"));
    // Of the step before, one is cut off.
    on_rank_0(run.mesh, [&] {
      flip_bit(host(0) + "/step-2/__1_0.distcp", 4000, 2);
      fs::resize_file(host(0) + "/step-1/__0_0.distcp", 10);
    });
    const auto before = load(other, rank, 1);
    EXPECT_EQ(step_of(before), 1);
    EXPECT_TRUE(has(before->skipped.back(), "step-2: no host has __1_0.distcp in its memory")) << before->skipped.back();
    EXPECT_EQ(before->origin == kThisHost, rank == 1) << before->origin;
    on_rank_0(run.mesh, [&] {
      fs::resize_file(host(1) + "/step-1/.fsdp-checksums", 10);
      flip_bit(host(0) + "/step-1/__1_0.distcp", 4000, 2);
    });
    const auto message = message_of([&] { load(other, rank, 1); });
    EXPECT_TRUE(has(message, "is intact; to start again")) << message;
  });
}

TEST_F(Memory, OfAHostThatIsFullIsAnErrorAndTheStepBeforeStays) {
  run_ranks(2, [&](int rank) {
    Training run;
    AsyncSaver saver(*run.model, run.optimizer.get(), {.memory = memory(rank, 1)});
    saver.save_in_memory("step-1", at(1));
    saver.wait();
    for (const int calls : {0, 2, 4, 6, 8}) {
      {
        fsdp::testing::FaultyFiles files;
        const fsdp::ckpt::ReplacedFileSystem replaced(files);
        if (rank == 1) files.calls_with_space = calls;
        saver.save_in_memory("step-2", at(2));
        const auto message = message_of([&] { saver.wait(); });
        EXPECT_TRUE(has(message, "step") && has(message, " could not be ") && has(message, "rank 1: cannot ") &&
                    has(message, "No space left on device"))
            << calls << message;
      }
      // If the other host had committed it already, it has all files.
      const auto step = step_of(load(run, rank, 1));
      EXPECT_TRUE(step == 1 || (step == 2 && calls >= 6)) << calls;
      EXPECT_TRUE(fs::exists(host(rank) + "/step-1")) << calls;
    }
    saver.save_in_memory("step-3", at(3));
    saver.wait();
    EXPECT_EQ(step_of(load(run, rank, 1)), 3);
  });
}

// It is killed before each of its system calls that change something, while it writes its file or a copy, or commits the step.
TEST_F(Memory, OfARankThatDiesHasTheStepBefore) {
  for (int calls = 0; calls < 12; calls += 2) {
    const auto train = [&] {
      alarm(60);
      const int rank = std::stoi(std::getenv("RANK"));
      Training run;
      AsyncSaver saver(*run.model, run.optimizer.get(), {.memory = memory(rank, 1)});
      run.train(0, 1);
      saver.save_in_memory("step-1", at(1));
      saver.wait();
      run.train(1, 2);
      fsdp::testing::FaultyFiles files;
      std::atomic<int> left = calls;
      if (rank == 1) {
        files.before = [&](const std::string&, const std::string&) {
          if (left-- == 0) kill(getpid(), SIGKILL);
        };
      }
      const fsdp::ckpt::ReplacedFileSystem replaced(files);
      saver.save_in_memory("step-2", at(2));
      saver.wait();
      return 0;
    };
    ::testing::internal::CaptureStderr();
    EXPECT_NE(fsdp::comm::launch_ranks(2, train, {.grace = std::chrono::seconds(5)}), 0);
    ::testing::internal::GetCapturedStderr();
    run_ranks(2, [&](int rank) {
      Training run({}, fsdp::testing::adamw(), 12);
      const auto found = load(run, rank, 1);
      const auto step = step_of(found);
      EXPECT_TRUE(step == 1 || step == 2) << calls;
      Training expected;
      expected.train(0, static_cast<int>(step));
      fsdp::testing::expect_same_bits(state_of(run, "a"), state_of(expected, "b"));
      AsyncSaver saver(*run.model, run.optimizer.get(), {.memory = memory(rank, 1)});
      saver.save_in_memory("step-3", at(3));
      saver.wait();
      EXPECT_EQ(step_of(load(run, rank, 1)), 3);
      for (const auto& left : names_in(host(rank))) EXPECT_TRUE(left == ".fsdp-job" || left.starts_with("step-")) << left;
      saver.remove_memory();
      EXPECT_TRUE(names_in(path("host" + std::to_string(rank))).empty()) << "nothing is left";
    });
  }
}

// Also right before the next save: with a save every two steps, at most two are repeated.
TEST_F(Memory, ARankThatIsKilledStartsAgainAndRepeatsFewSteps) {
  const auto train = [&] {
    alarm(60);
    const int rank = std::stoi(std::getenv("RANK"));
    Training run({}, fsdp::testing::adamw(), 12);
    const auto begin = step_of(load(run, rank, 2));
    AsyncSaver saver(*run.model, run.optimizer.get(), {.memory = memory(rank, 2)});
    for (auto step = static_cast<int>(begin) + 1; step <= 9; ++step) {
      run.train(step - 1, step);
      const bool is_killed = (begin == 0 && step == 6) || (begin == 4 && step == 7);
      if (rank == 1 && is_killed) kill(getpid(), SIGKILL);
      if (step % 2 != 0) continue;
      saver.save_in_memory(name(step), at(step));
      saver.wait_for_memory();
    }
    fsdp::save(path("end"), *run.model, *run.optimizer, {{"begin", begin}}, {.rng = false});
    return 0;
  };
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(fsdp::comm::launch_ranks(2, train, {.grace = std::chrono::seconds(5), .max_restarts = 3}), 0);
  const auto printed = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(has(printed, "(2 of 3)") && !has(printed, "(3 of 3)")) << printed;
  run_ranks(2, [&](int rank) {
    Training run;
    const auto loaded = fsdp::load(path("end"), *run.model, *run.optimizer);
    EXPECT_EQ(loaded.get<std::int64_t>("begin"), 6);
    Training expected({}, fsdp::testing::adamw(), 12);
    expected.train(0, 9);
    fsdp::testing::expect_same_bits(state_of(run, "a"), state_of(expected, "b"));
  });
}

// The clock of the run before was ahead.
TEST_F(Memory, TheNewestIsTheLastOneSavedWhateverTheClock) {
  run_ranks(2, [&](int rank) {
    constexpr std::int64_t kHour = 3600 * std::int64_t{1000000000};
    fsdp::ckpt::note_saved(fsdp::ckpt::new_saved() + kHour);
    Training run;
    train_and_save(run, rank, 1, 1, {1});
  });
  fs::remove_all(path("host0"));
  fs::remove_all(path("host1"));
  run_ranks(2, [&](int rank) {
    Training run;
    EXPECT_EQ(step_of(load(run, rank, 1)), 1);
    AsyncSaver saver(*run.model, run.optimizer.get(), {.memory = memory(rank, 1)});
    saver.save_in_memory("step-2", at(2));
    saver.wait();
    EXPECT_EQ(step_of(load(run, rank, 1)), 2);
  });
}

TEST_F(Memory, DoesNotWaitForTheDisk) {
  run_ranks(2, [&](int rank) {
    Training run;
    AsyncSaver saver(*run.model, run.optimizer.get(), {.memory = memory(rank, 1)});
    fsdp::testing::FaultyFiles files;
    std::atomic<bool> may_commit = false, waited = false;
    files.before = [&](const std::string& call, const std::string& to) {
      if (call != "rename" || !has(to, "disk")) return;
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (!may_commit && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      waited = static_cast<bool>(may_commit);
    };
    const fsdp::ckpt::ReplacedFileSystem replaced(files);
    saver.save(disk() + "/step-1", at(1));
    for (int step = 2; step < 5; ++step) saver.save_in_memory(name(step), at(step));
    saver.wait_for_memory();
    EXPECT_TRUE(fs::exists(host(rank) + "/step-4"));
    may_commit = true;
    saver.wait();
    EXPECT_EQ(waited, rank == 0);
    EXPECT_EQ(step_of(load(run, rank, 1)), 4);
  });
}

TEST_F(Memory, APlanCountsItsBytes) {
  for (const std::string strategy : {"optim_grads_params", "optim", "no_shard"}) {
    run_ranks(2, [&](int rank) {
      const auto placements = fsdp::Placements::from_name(strategy);
      Training run({.placements = placements});
      run.train(0, 1);
      std::int64_t written = 0;
      const auto note = [&](const fsdp::PhaseReport& report) {
        if (report.phase == fsdp::Phase::kCollect) written = report.bytes;
      };
      fsdp::save(path(strategy), *run.model, *run.optimizer, {}, {.rng = false, .on_phase = note});
      const auto mesh = fsdp::planned_device_mesh("cpu", {{"dp_shard", 2}}, {.rank = rank});
      const auto model = fsdp::testing::make_stack();
      const auto plan = fsdp::plan(*model, {.mesh = mesh, .units = fsdp::testing::stack_units(), .placements = placements});
      // Beside what is planned, there are a count of updates for each parameter, on one rank, and a buffer.
      const auto others = 4 * static_cast<double>(model->parameters().size()) + 24;
      EXPECT_EQ(run.mesh.sum(static_cast<double>(written - plan.saver_memory(0))), others) << strategy;
      EXPECT_EQ(plan.saver_memory(1), 4 * plan.saver_memory(0));
      EXPECT_EQ(plan.saver_memory(2), 6 * plan.saver_memory(0));
    });
  }
}

// At each system call of saves, with the copies of another rank; and a plan has the size of large models.
TEST_F(Memory, HoldsTwoStepsAtMostWhileOneIsWritten) {
  run_ranks(2, [&](int rank) {
    const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
    torch::manual_seed(11);
    torch::nn::Linear model(512, 512);
    fsdp::fully_shard(*model, {.mesh = mesh});
    fsdp::AdamW optimizer(*model, {});
    model->forward(torch::ones({1, 512})).sum().backward();
    optimizer.step();
    AsyncSaver saver(*model, &optimizer, {.memory = memory(rank, 1)});
    std::int64_t most = 0;
    fsdp::testing::FaultyFiles files;
    files.before = [&](const std::string&, const std::string&) { most = std::max(most, bytes_in(host(rank))); };
    const fsdp::ckpt::ReplacedFileSystem replaced(files);
    for (int step = 1; step <= 4; ++step) saver.save_in_memory(name(step), at(step));
    saver.wait();
    const auto lease = static_cast<std::int64_t>(fs::file_size(host(rank) + "/.fsdp-job"));
    EXPECT_EQ(most, 2 * bytes_in(host(rank) + "/step-4") + lease);
    torch::nn::Linear planned(512, 512);
    const auto plan = fsdp::plan(*planned, {.mesh = fsdp::planned_device_mesh("cpu", {{"dp_shard", 2}}, {.rank = rank})});
    const auto in_files = plan.saver_memory(2) - 2 * plan.saver_memory(0);
    EXPECT_GE(most, in_files);
    EXPECT_LT(most, in_files + in_files / 50) << "heads, metadata and sums";
  });
}

// As after a night in which nobody started it again.
TEST_F(Memory, OfAKilledJobIsRemovedByAnotherOneAfterItsLease) {
  constexpr auto kMinute = std::chrono::minutes(1);
  for (const int minutes : {29, 31}) {
    const auto killed = [&] {
      Training run;
      AsyncSaver saver(*run.model, run.optimizer.get(), {.memory = path("shm/killed")});
      saver.save_in_memory("step-1", at(1));
      saver.wait();
      kill(getpid(), SIGKILL);
      return 0;
    };
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(fsdp::comm::launch_ranks(2, killed, {.grace = std::chrono::seconds(5)}), 1);
    ::testing::internal::GetCapturedStderr();
    // The stamp of the last renewal, in nanoseconds.
    std::fstream lease(path("shm/killed/.fsdp-job"), std::ios::in | std::ios::out);
    lease.seekg(static_cast<std::streamoff>(std::string("fsdp-owner 1\nrenewed ").size()));
    const auto at_stamp = lease.tellg();
    std::string stamp;
    lease >> stamp;
    const auto renewed = std::stoll(stamp) - std::chrono::nanoseconds(minutes * kMinute).count();
    lease.seekp(at_stamp);
    lease << std::setfill('0') << std::setw(static_cast<int>(stamp.size())) << renewed;
    lease.close();
    run_ranks(2, [&] {
      Training run;
      AsyncSaver saver(*run.model, run.optimizer.get(), {.memory = path("shm/other")});
      EXPECT_EQ(fs::exists(path("shm/killed")), minutes < 30);
      EXPECT_EQ(fs::exists(path("shm/killed/step-1/.metadata")), minutes < 30);
      saver.remove_memory();
    });
  }
}

TEST_F(Memory, RefusesWhatItCannotUse) {
  run_ranks(2, [&](int rank) {
    Training run;
    const auto error = [&](fsdp::AsyncSaverOptions options) {
      return message_of([&] { AsyncSaver(*run.model, nullptr, std::move(options)); });
    };
    EXPECT_TRUE(has(error({.memory = memory(rank, 1), .distance = 2}), "distance is 2, and there are 2 hosts with memory of their own"));
    EXPECT_TRUE(has(error({.memory = rank == 0 ? memory(0, 1) : ""}), "rank 1: memory is empty on this rank, and not on others"));
    if (rank == 1) folder.write("host1/notes", "mine");
    const auto message = error({.memory = path("host" + std::to_string(rank))});
    EXPECT_TRUE(has(message, "rank 1: " + path("host1") + " contains 'notes' and belongs to no job")) << message;
    EXPECT_TRUE(fs::exists(path("host1/notes")) || rank == 0);

    AsyncSaver saver(*run.model, nullptr, {.memory = memory(rank, 1)});
    const auto in_use = error({.memory = memory(rank, 1)});
    EXPECT_TRUE(has(in_use, "/run is in use by process " + std::to_string(getpid()))) << in_use;
    const auto refused = [&](const std::string& step) {
      saver.save_in_memory(step);
      return message_of([&] { saver.wait(); });
    };
    EXPECT_TRUE(has(refused("runs/step-1"), "'runs/step-1' is no name for a step in memory"));
    EXPECT_TRUE(has(refused(name(rank)), "rank 1: was called with the name step-1, and rank 0 with another one"));
    AsyncSaver without(*run.model);
    EXPECT_TRUE(has(message_of([&] { without.save_in_memory("step-1"); }), "give AsyncSaverOptions::memory"));
  });
}

}  // namespace memory_test
