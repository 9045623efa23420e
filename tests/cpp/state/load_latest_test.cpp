// Which checkpoint load_latest takes where the newest one is damaged, unreadable or somebody else's, and that every rank is told.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "fsdp/save_load.h"
#include "support/checkpoint_test.h"
#include "support/collected_warnings.h"
#include "support/faulty_files.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/training.h"

namespace load_latest_test {

namespace fs = std::filesystem;

using fsdp::testing::flip_bit;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::on_rank_0;
using fsdp::testing::run_ranks;
using fsdp::testing::Training;

constexpr int kRanks = 2;

class LoadLatest : public fsdp::testing::CheckpointTest {
 protected:
  /// Saves steps 1 to `last`, and damages files on rank 0.
  template <typename Damage>
  void save(Training& run, std::int64_t last, const Damage& damage) const {
    for (std::int64_t step = 1; step <= last; ++step) {
      fsdp::save(path("step-" + std::to_string(step)), *run.model, *run.optimizer, {{"step", step}});
    }
    on_rank_0(run.mesh, damage);
  }

  /// Of files with many blocks: those with counts of updates are read before the others.
  const fsdp::testing::StackOptions large{.width = 200, .hidden = {1500, 1500}};

  static std::int64_t step_of(const fsdp::Loaded& loaded) { return std::get<std::int64_t>(loaded.extra.at("step")); }
};

TEST_F(LoadLatest, TakesTheStepBeforeADamagedOneAndSaysSoOnEveryRank) {
  run_ranks(kRanks, [&] {
    Training run;
    save(run, 5, [&] {
      flip_bit(path("step-5/__1_0.distcp"), 4000, 1);    // a rank's own data: one rank alone finds it
      flip_bit(path("step-4/.metadata"), 100, 1);        // found by all
      fs::resize_file(path("step-3/__0_0.distcp"), 10);  // seen without reading
      fs::resize_file(path("step-2/.fsdp-checksums"), 10);
    });
    fsdp::testing::CollectedWarnings warnings;
    const auto loaded = fsdp::load_latest(folder.path(), *run.model, *run.optimizer);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(step_of(*loaded), 1);
    ASSERT_EQ(loaded->skipped.size(), 4);
    EXPECT_TRUE(has(loaded->skipped[0], path("step-5")) && has(loaded->skipped[0], "__1_0.distcp has the checksum")) << loaded->skipped[0];
    EXPECT_TRUE(has(loaded->skipped[1], path("step-4")) && has(loaded->skipped[1], ".metadata has the checksum")) << loaded->skipped[1];
    EXPECT_TRUE(has(loaded->skipped[2], "__0_0.distcp has 10 bytes instead of")) << loaded->skipped[2];
    EXPECT_TRUE(has(loaded->skipped[3], "step-2/.fsdp-checksums is damaged")) << loaded->skipped[3];
    EXPECT_TRUE(has(warnings.text(), "load_latest took " + path("step-1") + " and not what is newer:")) << warnings.text();
    // The next save is the newest again, and nothing is skipped.
    fsdp::save(path("step-2"), *run.model, *run.optimizer, {{"step", std::int64_t{2}}});
    EXPECT_TRUE(fsdp::load_latest(folder.path(), *run.model, *run.optimizer)->skipped.empty());
  });
}

TEST_F(LoadLatest, DoesNotBeginAnewWhereAllAreDamaged) {
  run_ranks(kRanks, [&] {
    Training run;
    save(run, 2, [&] {
      flip_bit(path("step-2/__1_0.distcp"), 4000, 1);
      fs::resize_file(path("step-1/__1_0.distcp"), 10);
    });
    const auto message = message_of([&] { fsdp::load_latest(folder.path(), *run.model, *run.optimizer); });
    EXPECT_TRUE(message.starts_with("no checkpoint in " + folder.path().string() + " is intact; to start again")) << message;
    EXPECT_TRUE(has(message, "step-2: ") && has(message, "step-1: ")) << message;
  });
}

TEST_F(LoadLatest, TellsOfNewerOnesThatPythonWrote) {
  run_ranks(kRanks, [&] {
    Training run;
    save(run, 2, [&] {
      for (const char* name : {"step-1", "step-9"}) {
        fs::create_directories(path(name));
        fs::copy(path("step-2/.metadata"), path(std::string(name) + "/.metadata"), fs::copy_options::overwrite_existing);
        fs::remove(path(std::string(name) + "/.fsdp-checksums"));
      }
    });
    const auto loaded = fsdp::load_latest(folder.path(), *run.model, *run.optimizer);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(step_of(*loaded), 2);
    ASSERT_EQ(loaded->skipped.size(), 1);
    EXPECT_TRUE(has(loaded->skipped[0], path("step-9") + ": it was written by torch.distributed.checkpoint")) << loaded->skipped[0];
    on_rank_0(run.mesh, [&] { fs::remove_all(path("step-2")); });
    fsdp::testing::CollectedWarnings warnings;
    EXPECT_FALSE(fsdp::load_latest(folder.path(), *run.model, *run.optimizer));
    EXPECT_TRUE(has(warnings.text(), "step-9")) << warnings.text();
  });
}

// A disk that does not answer, and a model that does not fit, are no damage: an older step would lose work, or not fit either.
TEST_F(LoadLatest, TakesNoOlderOneForOtherFaults) {
  run_ranks(kRanks, [&](int rank) {
    Training trained;
    trained.train(0, 1);
    save(trained, 2, [&] { flip_bit(path("step-2/__1_0.distcp"), 4000, 1); });
    for (const int code : {EIO, ESTALE, EMFILE, EACCES}) {
      // While it looks for checkpoints, and while it reads one: once, for a new model.
      for (const int good_preads : {-1, 0, 2, 4, 6}) {
        const bool while_reading = good_preads >= 0;
        fsdp::testing::FaultyFiles files;
        if (while_reading && rank == 0) files.pread_error = code;  // rank 1 finds damage meanwhile
        if (while_reading) files.good_preads = good_preads;
        if (!while_reading) files.look_error = code;
        files.unseen = "step-2/__0_0";
        const fsdp::ckpt::ReplacedFileSystem replaced(files);
        auto message = message_of([&] { fsdp::load_latest(folder.path(), *trained.model, *trained.optimizer); });
        EXPECT_TRUE(message.starts_with("nothing was loaded:\n  rank 0: cannot ")) << message;
        if (good_preads > 4) continue;
        if (while_reading) files.good_preads = good_preads;
        Training fresh;
        message = message_of([&] { fsdp::load_latest(folder.path(), *fresh.model, *fresh.optimizer); });
        EXPECT_TRUE(message.starts_with("nothing was loaded:") || message.starts_with("the load ended halfway")) << message;
        EXPECT_TRUE(has(message, "\n  rank 0: cannot ")) << message;
      }
    }
    Training other({}, fsdp::testing::adamw(), 12, {.width = 7});
    EXPECT_TRUE(has(message_of([&] { fsdp::load_latest(folder.path(), *other.model); }), "has shape"));
  });
}

// What is damaged in the newest one is found when a part of it is loaded. The older one replaces all of that, also where it has less: plain
// SGD keeps nothing of a parameter that it has not updated.
TEST_F(LoadLatest, ReplacesWhatADamagedOneHasLeftInANewModel) {
  run_ranks(kRanks, [&] {
    const auto sgd = fsdp::testing::make<fsdp::SGD>(fsdp::SGDOptions{.lr = 0.1});
    Training run({}, sgd, 11, large);
    fsdp::save(path("step-1"), *run.model, *run.optimizer, {{"step", std::int64_t{1}}});
    const auto before = run.handle->full_parameters();
    run.train(0, 1);
    fsdp::save(path("step-2"), *run.model, *run.optimizer, {{"step", std::int64_t{2}}});
    on_rank_0(run.mesh, [&] { flip_bit(path("step-2/__1_0.distcp"), fsdp::ckpt::kSummedBlock / 2, 1); });
    Training fresh({}, sgd, 12, large);
    const auto loaded = fsdp::load_latest(folder.path(), *fresh.model, *fresh.optimizer);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(step_of(*loaded), 1);
    ASSERT_EQ(loaded->skipped.size(), 1);
    EXPECT_TRUE(has(loaded->skipped[0], "the load ended halfway")) << loaded->skipped[0];
    fsdp::testing::expect_same_bits(fresh.handle->full_parameters(), before);
    fresh.train(0, 1);
    fsdp::testing::expect_same_bits(fresh.handle->full_parameters(), run.handle->full_parameters());
  });
}

// The older one does not fit: the error tells of the newer one, too, which has left the model torn.
TEST_F(LoadLatest, TellsWhatHasLeftTheModelTorn) {
  run_ranks(kRanks, [&] {
    Training narrow({}, fsdp::testing::adamw(), 12, {.width = 7});
    fsdp::save(path("step-1"), *narrow.model, *narrow.optimizer);
    Training run({}, fsdp::testing::adamw(), 11, large);
    fsdp::save(path("step-2"), *run.model, *run.optimizer);
    on_rank_0(run.mesh, [&] { flip_bit(path("step-2/__1_0.distcp"), fsdp::ckpt::kSummedBlock / 2, 1); });
    const auto message = message_of([&] { fsdp::load_latest(folder.path(), *run.model, *run.optimizer); });
    EXPECT_TRUE(message.starts_with("nothing was loaded:") && has(message, "has shape")) << message;
    EXPECT_TRUE(has(message, "before, these were tried:") && has(message, path("step-2") + ": the load ended halfway")) << message;
  });
}

// A run that began anew would be the silent one of these mistakes.
TEST_F(LoadLatest, OfACheckpointIsAnError) {
  run_ranks(kRanks, [&] {
    Training run;
    save(run, 2, [] {});
    const auto itself = path("step-2") + " is no folder of checkpoints: it is a checkpoint itself";
    EXPECT_TRUE(has(message_of([&] { fsdp::load_latest(path("step-2"), *run.model, *run.optimizer); }), itself));
    EXPECT_TRUE(has(message_of([&] { fsdp::latest(path("step-2")); }), itself));
    EXPECT_TRUE(has(message_of([&] { fsdp::best(path("step-2")); }), itself));
    const auto of_several = message_of([&] { fsdp::load(folder.path().string(), *run.model, *run.optimizer); });
    EXPECT_TRUE(has(of_several, " is no checkpoint: it is a folder of checkpoints, and holds step-1, step-2; name one of them"))
        << of_several;
    on_rank_0(run.mesh, [&] { fs::create_directory(path("empty")); });
    EXPECT_TRUE(
        has(message_of([&] { fsdp::load(path("empty"), *run.model, *run.optimizer); }), "is no checkpoint: it has neither metadata"));
  });
}

// A mistyped folder, or a name without a number, must not look like a first start.
TEST_F(LoadLatest, SaysWhatItDoesNotTake) {
  run_ranks(kRanks, [&](int rank) {
    Training run;
    const auto warning_of = [&](const std::string& from, bool loads) {
      fsdp::testing::CollectedWarnings warnings;
      EXPECT_EQ(fsdp::load_latest(from, *run.model, *run.optimizer).has_value(), loads);
      return warnings.text();
    };
    on_rank_0(run.mesh, [&] { fs::create_directory(path("empty")); });
    const auto none = warning_of(path("mistyped"), false);
    EXPECT_EQ(has(none, "load_latest loaded nothing: there is no folder " + path("mistyped")), rank == 0) << none;
    const auto empty = warning_of(path("empty"), false);
    EXPECT_EQ(has(empty, "load_latest loaded nothing: there is no checkpoint in " + path("empty")), rank == 0) << empty;
    fsdp::save(path("20261128235959123456"), *run.model, *run.optimizer);
    EXPECT_EQ(fsdp::latest(folder.path()), path("20261128235959123456"));
    EXPECT_EQ(warning_of(folder.path(), true), "");
    fsdp::save(path("final"), *run.model, *run.optimizer);
    const auto unnumbered = path("final") + ": its name does not end in a number";
    EXPECT_TRUE(has(warning_of(folder.path(), true), unnumbered));
    on_rank_0(run.mesh, [&] { fs::remove_all(path("20261128235959123456")); });
    const auto all = warning_of(folder.path(), false);
    EXPECT_TRUE(has(all, "load_latest took none of the checkpoints") && has(all, unnumbered)) << all;
  });
}

TEST_F(LoadLatest, OfAnEmptyPathIsAnError) {
  run_ranks(kRanks, [&] {
    Training run;
    const auto expect = [](const std::string& error, const auto& call) {
      const auto message = message_of(call);
      EXPECT_TRUE(has(message, error)) << message;
    };
    expect("the path of a folder of checkpoints is empty", [&] { fsdp::load_latest("", *run.model, *run.optimizer); });
    expect("the path of a folder of checkpoints is empty", [&] { fsdp::latest(""); });
    expect("the path of a checkpoint is empty", [&] { fsdp::load("", *run.model, *run.optimizer); });
    expect("the path to save to is empty", [&] { fsdp::save("", *run.model, *run.optimizer); });
    expect("the path to save to is empty", [&] { fsdp::export_safetensors("", *run.model); });
    fsdp::AsyncSaver saver(*run.model);
    expect("the path to save to is empty", [&] {
      saver.save("");
      saver.wait();
    });
  });
}

}  // namespace load_latest_test
