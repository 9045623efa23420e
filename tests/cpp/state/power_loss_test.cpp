// What a loss of power leaves at any moment of saving, overwriting, pruning and exporting: only what was synced, or names that the disk
// wrote of its own accord before what they name. And that not one fsync could be left out.

#include "support/power_loss.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <climits>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "checkpoint/commit.h"
#include "checkpoint/steps.h"
#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "support/multi_rank.h"
#include "support/python_peer.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace power_loss_test {

namespace fs = std::filesystem;

using fsdp::testing::PowerLossFiles;
using fsdp::testing::run_ranks;
using fsdp::testing::Training;

/// Saves, and looks at every moment what would be left.
class Scenario {
 public:
  Scenario(Training& run, bool can_exchange) : run_(run), files_(folder_.path()) {
    files_.can_exchange = can_exchange;
    files_.after_change = [this] { check(); };
  }

  /// The first thing that was wrong; empty if nothing was.
  const std::string& violation() const { return violation_; }
  int fsyncs() const { return files_.fsyncs(); }
  int moments() const { return moments_; }
  bool is_repeated(int fsync) const { return files_.is_repeated(fsync); }
  void skip_fsync(int number) { files_.skipped_fsync = number; }

  /// Until something is wrong.
  void play() {
    const fsdp::ckpt::ReplacedFileSystem replaced(files_);
    save("1", [&](const std::string& path) { fsdp::save(path, *run_.model, *run_.optimizer); });
    save("1", [&](const std::string& path) { fsdp::save(path, *run_.model, *run_.optimizer); });
    save("2", [&](const std::string& path) { fsdp::save(path, *run_.model, *run_.optimizer, {}, {.keep_last = 1}); });
    fsdp::AsyncSaver saver(*run_.model, run_.optimizer.get());
    save("3", [&](const std::string& path) {
      saver.save(path, {}, {.keep_last = 2});
      saver.wait();
    });
    if (!violation_.empty()) return;
    fsdp::export_safetensors((top() / "exported").string(), *run_.model, {.most_bytes_per_file = 1000});
    expect_on_disk(top() / "exported");
  }

 private:
  fs::path top() const { return folder_.path() / "runs"; }

  void save(const std::string& name, const std::function<void(const std::string& path)>& save) {
    if (!violation_.empty()) return;
    save(top() / name);
    expect_on_disk(top() / name);
    acknowledged_ = fsdp::ckpt::read_sidecar(top() / name).saved;
    check();
  }

  /// What was acknowledged would be left, byte for byte.
  void expect_on_disk(const fs::path& path) {
    if (!violation_.empty()) return;
    const fsdp::testing::TemporaryFolder left;
    files_.leave(PowerLossFiles::Written::kSyncedOnly, left.path() / "top");
    const auto copy = left.path() / "top" / path.lexically_relative(folder_.path());
    for (const auto& entry : fs::directory_iterator(path)) {
      const auto name = entry.path().filename();
      if (name == fsdp::ckpt::kOwnerFile) continue;
      if (!fs::exists(copy / name) || fsdp::testing::read_file(copy / name) != fsdp::testing::read_file(entry.path())) {
        violation_ = entry.path().string() + " was acknowledged, and not on the disk";
      }
    }
  }

  void check() {
    if (files_.fsyncs() <= files_.skipped_fsync) return;  // Nothing is other than without that.
    for (const auto written : PowerLossFiles::kAll) {
      if (!violation_.empty()) return;
      ++moments_;
      const fsdp::testing::TemporaryFolder left;
      files_.leave(written, left.path() / "top");
      // Not through the files that are being recorded.
      auto& real = fsdp::ckpt::FileSystem::real();
      std::int64_t newest = 0;
      for (const auto& step : fsdp::ckpt::find_steps(left.path() / "top/runs", {}, real)) {
        if (step.state != fsdp::ckpt::Step::State::kComplete) {
          violation_ = step.path.string() + " is there and not whole: " + step.fault;
          return;
        }
        try {
          fsdp::ckpt::verify_step(step.path, real);
        } catch (const fsdp::Error& error) {
          violation_ = error.what();
          return;
        }
        newest = step.saved;
      }
      if (newest < acknowledged_) violation_ = "what was saved last is not the newest";
    }
  }

  Training& run_;
  const fsdp::testing::TemporaryFolder folder_;
  PowerLossFiles files_;
  std::int64_t acknowledged_ = 0;
  int moments_ = 0;
  std::string violation_;
};

TEST(PowerLoss, LeavesAWholeNewestStepAtAnyMoment) {
  run_ranks(1, [] {
    Training run;
    run.train(0, 1);
    for (const bool can_exchange : {true, false}) {
      Scenario scenario(run, can_exchange);
      scenario.play();
      EXPECT_EQ(scenario.violation(), "");
      EXPECT_GT(scenario.moments(), 200);
      EXPECT_GT(scenario.fsyncs(), 20);
    }
  });
}

TEST(PowerLoss, NoFsyncCanBeLeftOut) {
  run_ranks(1, [] {
    Training run;
    run.train(0, 1);
    Scenario unchecked(run, /*can_exchange=*/true);
    unchecked.skip_fsync(INT_MAX);
    unchecked.play();
    const int fsyncs = unchecked.fsyncs();
    for (int skipped = 0; skipped < fsyncs; ++skipped) {
      Scenario scenario(run, /*can_exchange=*/true);
      scenario.skip_fsync(skipped);
      scenario.play();
      EXPECT_TRUE(!scenario.violation().empty() || scenario.is_repeated(skipped))
          << "fsync number " << skipped << " of " << scenario.fsyncs();
    }
    EXPECT_GT(fsyncs, 20);
  });
}

}  // namespace power_loss_test
