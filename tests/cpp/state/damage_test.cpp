// Checkpoints that are damaged, and disks that begin to fail in the middle of a load: what a load needs of a checkpoint is checked, as a
// rule before anything changes, and what it does not need is not looked at.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/commit.h"
#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "support/checkpoint_test.h"
#include "support/counting_files.h"
#include "support/faulty_files.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/stored.h"
#include "support/training.h"

namespace damage_test {

namespace fs = std::filesystem;

using fsdp::testing::adamw;
using fsdp::testing::CountingFiles;
using fsdp::testing::expect_same_bits;
using fsdp::testing::FaultyFiles;
using fsdp::testing::flip_bit;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::on_rank_0;
using fsdp::testing::run_ranks;
using fsdp::testing::Training;

constexpr int kRanks = 2;

/// Changes a file on rank 0, and changes it back when it goes; other ranks wait both times.
class Flipped {
 public:
  Flipped(const fsdp::DeviceMesh& mesh, fs::path path, std::int64_t offset) : mesh_(mesh), path_(std::move(path)), offset_(offset) {
    toggle();
  }
  ~Flipped() { toggle(); }
  Flipped(const Flipped&) = delete;
  Flipped& operator=(const Flipped&) = delete;

 private:
  void toggle() {
    on_rank_0(mesh_, [this] { flip_bit(path_, offset_, static_cast<int>(offset_ % 8)); });
  }

  const fsdp::DeviceMesh& mesh_;
  fs::path path_;
  std::int64_t offset_;
};

class Damage : public fsdp::testing::CheckpointTest {
 protected:
  const std::string path = CheckpointTest::path("1");
  /// Of files with many blocks.
  const fsdp::testing::StackOptions large{.width = 200, .hidden = {1500, 1500}};
};

// Records' descriptions, data, checksums and padding, plain values, metadata, the sidecar itself.
TEST_F(Damage, AFlippedBitAnywhereIsOneErrorAndChangesNothing) {
  run_ranks(kRanks, [&] {
    const Training run = trained_and_saved(path, {}, {{"step", std::int64_t{1}}});
    Training other = trained_otherwise();
    const auto before = other.handle->full_parameters();
    const auto mesh = other.mesh;
    for (const std::string name : {"__0_0.distcp", "__1_0.distcp", ".metadata", ".fsdp-checksums"}) {
      const auto size = static_cast<std::int64_t>(fs::file_size(fs::path(path) / name));
      // All offsets modulo 64, to which records are aligned, and the ends.
      std::vector<std::int64_t> offsets = {0, size - 1};
      for (std::int64_t offset = 1; offset < size; offset += std::max<std::int64_t>(size / 24 | 1, 1)) offsets.push_back(offset);
      for (const auto offset : offsets) {
        SCOPED_TRACE(name + " at " + std::to_string(offset));
        const Flipped flipped(mesh, fs::path(path) / name, offset);
        const auto message = message_of([&] { fsdp::load(path, *other.model, *other.optimizer); });
        EXPECT_TRUE(message.starts_with("nothing was loaded:\n  rank ")) << message;
        EXPECT_TRUE(has(message, "damaged") && has(message, name)) << message;
      }
    }
    expect_same_bits(other.handle->full_parameters(), before);
    // It trains on as if nothing had been, and loads what is whole again.
    Training untouched = trained_otherwise();
    untouched.train(1, 2);
    other.train(1, 2);
    expect_same_bits(other.handle->full_parameters(), untouched.handle->full_parameters());
    EXPECT_EQ(std::get<std::int64_t>(fsdp::load(path, *other.model, *other.optimizer).extra.at("step")), 1);
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
  });
}

// The same where files have many blocks: each is compared with its own checksum.
TEST_F(Damage, AFlippedBitInAnyBlockOfLargeFilesIsOneError) {
  run_ranks(kRanks, [&] {
    const Training run = trained_and_saved(path, large);
    Training other = trained_otherwise(large);
    const auto before = other.handle->full_parameters();
    for (const std::string name : {"__0_0.distcp", "__1_0.distcp"}) {
      const auto size = static_cast<std::int64_t>(fs::file_size(fs::path(path) / name));
      ASSERT_GT(size, 6 * fsdp::ckpt::kSummedBlock);
      for (std::int64_t block = 0; block < size; block += fsdp::ckpt::kSummedBlock) {
        const auto length = std::min(fsdp::ckpt::kSummedBlock, size - block);
        for (const auto offset : {block, block + length / 3, block + length - 1}) {
          SCOPED_TRACE(name + " at " + std::to_string(offset));
          const Flipped flipped(other.mesh, fs::path(path) / name, offset);
          const auto message = message_of([&] { fsdp::load(path, *other.model, *other.optimizer); });
          EXPECT_TRUE(message.starts_with("nothing was loaded:")) << message;
          EXPECT_TRUE(has(message, "in bytes " + std::to_string(block) + " to " + std::to_string(block + length - 1) + ": they changed"))
              << message;
        }
      }
    }
    expect_same_bits(other.handle->full_parameters(), before);
    fsdp::load(path, *other.model, *other.optimizer);
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
  });
}

TEST_F(Damage, IsReportedByWhoNeedsIt) {
  run_ranks(kRanks, [&] {
    const Training run = trained_and_saved(path, large);
    const auto file = fs::path(path) / "__1_0.distcp";
    const auto size = static_cast<std::int64_t>(fs::file_size(file));
    ASSERT_GT(size, 6 * fsdp::ckpt::kSummedBlock);
    Training other = trained_otherwise(large);
    {
      // The first block has parameters, the last one but one the optimizer's moments.
      const Flipped flipped(other.mesh, file, size - size % fsdp::ckpt::kSummedBlock - 1);
      EXPECT_TRUE(
          has(message_of([&] { fsdp::load(path, *other.model, *other.optimizer); }), "rank 1: the checkpoint " + path + " is damaged"));
      fsdp::load(path, *other.model);
      EXPECT_TRUE(has(message_of([&] { fsdp::ckpt::verify_step(path); }), "__1_0.distcp has the checksum"));
    }
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
    const Flipped flipped(other.mesh, file, fsdp::ckpt::kSummedBlock / 2);
    other.train(1, 2);
    const auto before = other.handle->full_parameters();
    EXPECT_TRUE(has(message_of([&] { fsdp::load(path, *other.model); }), "rank 1: the checkpoint " + path + " is damaged"));
    expect_same_bits(other.handle->full_parameters(), before);
  });
}

/// Nobody computes with values of two models, or saves them.
void expect_refused(Training& run, int rank, const std::string& path) {
  const std::string refusal = "a load of this model failed halfway";
  EXPECT_TRUE(has(message_of([&] { run.model->forward(fsdp::testing::stack_input(0, rank)); }), refusal));
  EXPECT_TRUE(has(message_of([&] { fsdp::save(path, *run.model, *run.optimizer); }), refusal));
  EXPECT_TRUE(has(message_of([&] { run.optimizer->step(); }), refusal));
  EXPECT_TRUE(has(message_of([&] { const fsdp::SummonFullParams whole(*run.model); }), refusal));
}

// A disk that fails while a checkpoint is being checked changes nothing. One that fails later leaves a model that has to be loaded again;
// both are one error on every rank.
TEST_F(Damage, ADiskThatFailsInTheMiddle) {
  run_ranks(kRanks, [&](int rank) {
    Training run = trained_and_saved(path);
    std::optional<Training> other;
    bool ended = false;
    int unchanged = 0;
    int changed = 0;
    for (std::int64_t good = 0; !ended; good += good / 16 + 1) {
      SCOPED_TRACE(good);
      other = trained_otherwise();
      const auto before = other->handle->full_parameters();
      FaultyFiles files;
      files.good_preads = good;
      if (rank == 1) files.pread_error = EIO;
      std::string message;
      {
        const fsdp::ckpt::ReplacedFileSystem replaced(files);
        message = message_of([&] { fsdp::load(path, *other->model, *other->optimizer); });
      }
      ended = message == "no error";
      if (ended) continue;
      EXPECT_TRUE(has(message, "rank 1: ") && has(message, "Input/output error")) << message;
      if (has(message, "nothing was loaded:")) {
        ++unchanged;
        expect_same_bits(other->handle->full_parameters(), before);
        continue;
      }
      ++changed;
      EXPECT_TRUE(message.starts_with("the checkpoint was intact, but then could no longer be read")) << message;
      expect_refused(*other, rank, path + "_torn");
      fsdp::load(path, *other->model, *other->optimizer);
      expect_same_bits(other->handle->full_parameters(), run.handle->full_parameters());
    }
    EXPECT_GT(unchanged, 0);
    EXPECT_GT(changed, 0);
    expect_same_bits(other->handle->full_parameters(), run.handle->full_parameters());
    run.train(1, 2);
    other->train(1, 2);
    expect_same_bits(other->handle->full_parameters(), run.handle->full_parameters());
  });
}

// A new model has nothing to lose, and is loaded in one reading. What is damaged leaves it refused, until a load replaces all of it.
TEST_F(Damage, LeavesANewModelRefused) {
  run_ranks(kRanks, [&](int rank) {
    Training run = trained_and_saved(path, large);
    Training other({}, adamw(), 12, large);
    {
      const Flipped flipped(other.mesh, fs::path(path) / "__1_0.distcp", fsdp::ckpt::kSummedBlock / 2);
      const auto message = message_of([&] { fsdp::load(path, *other.model, *other.optimizer); });
      EXPECT_TRUE(message.starts_with("the load ended halfway, and the model is partly loaded; until another load succeeds")) << message;
      EXPECT_TRUE(has(message, "rank 1: the checkpoint " + path + " is damaged")) << message;
      expect_refused(other, rank, path + "_torn");
    }
    // A load that would keep some of it.
    const auto ignore = [](const std::string& name) { return name.starts_with("model.") && name.ends_with("bias"); };
    const auto message = message_of([&] { fsdp::load(path, *other.model, *other.optimizer, {.ignore = ignore}); });
    EXPECT_TRUE(message.starts_with("nothing was loaded:") && has(message, "an earlier load failed halfway")) << message;
    EXPECT_TRUE(has(message, "bias") && !has(message, "weight") && !has(message, "optim.")) << message;
    expect_refused(other, rank, path + "_torn");
    fsdp::load(path, *other.model, *other.optimizer, {.strict = false});
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
    run.train(1, 2);
    other.train(1, 2);
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
  });
}

// The model is whole again when a load has replaced what is its own. The optimizer's state stays refused, and another optimizer's load does
// not change that.
TEST_F(Damage, LeavesTheOptimizerRefusedUntilItIsLoaded) {
  run_ranks(kRanks, [&](int rank) {
    Training run = trained_and_saved(path, large);
    Training other({}, adamw(), 12, large);
    const auto another = adamw()(*other.model);
    {
      const Flipped flipped(other.mesh, fs::path(path) / "__1_0.distcp", fsdp::ckpt::kSummedBlock / 2);
      EXPECT_TRUE(has(message_of([&] { fsdp::load(path, *other.model, *other.optimizer); }), "the load ended halfway"));
    }
    const std::string refusal = "a load of this optimizer failed halfway";
    const auto expect_optimizer_refused = [&] {
      EXPECT_TRUE(has(message_of([&] { other.optimizer->step(); }), refusal));
      EXPECT_TRUE(has(message_of([&] { fsdp::save(path + "_torn", *other.model, *other.optimizer); }), refusal));
    };
    fsdp::load(path, *other.model);
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
    other.model->forward(fsdp::testing::stack_input(0, rank));
    fsdp::save(path + "_model", *other.model);
    expect_optimizer_refused();
    // A checkpoint that lacks its state would leave it as it is.
    const auto message = message_of([&] { fsdp::load(path + "_model", *other.model, *other.optimizer, {.strict = false}); });
    EXPECT_TRUE(has(message, "an earlier load failed halfway") && has(message, ".exp_avg")) << message;
    fsdp::load(path, *other.model, *another);
    expect_optimizer_refused();
    another->step();
    // Nobody needs its values any more.
    fsdp::load(path, *other.model, *other.optimizer, {.check_first = false});
    run.train(1, 2);
    other.train(1, 2);
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
  });
}

// What a checkpoint has not is not torn: the same load can be tried again.
TEST_F(Damage, ALenientLoadThatFailedCanBeRepeated) {
  run_ranks(kRanks, [&](int rank) {
    Training run = trained_and_saved(path);
    fsdp::save(path, *run.model);
    int torn = 0;
    bool ended = false;
    for (std::int64_t good = 0; !ended; ++good) {
      Training other = trained_otherwise();
      FaultyFiles files;
      files.good_preads = good;
      if (rank == 1) files.pread_error = EIO;
      const fsdp::LoadOptions lenient{.strict = false};
      std::string message;
      {
        const fsdp::ckpt::ReplacedFileSystem replaced(files);
        message = message_of([&] { fsdp::load(path, *other.model, *other.optimizer, lenient); });
      }
      ended = message == "no error";
      if (ended || message.starts_with("nothing was loaded:")) continue;
      ++torn;
      EXPECT_FALSE(fsdp::load(path, *other.model, *other.optimizer, lenient).missing.empty());
      expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
      other.train(1, 2);
    }
    EXPECT_GT(torn, 0);
  });
}

// Bytes tell which loads check first. Whoever has written the model, on whichever rank: its values are not risked unless all agree.
TEST_F(Damage, BytesTellWhichLoadsCheckFirst) {
  run_ranks(kRanks, [&](int rank) {
    const Training run = trained_and_saved(path, large);
    std::int64_t needed = 0;
    const fsdp::LoadOptions strict{.on_phase = [&](const fsdp::PhaseReport& report) { needed = report.bytes; }};
    const auto readings = [&](Training& other, const fsdp::LoadOptions& options) {
      CountingFiles files;
      const fsdp::ckpt::ReplacedFileSystem replaced(files);
      fsdp::load(path, *other.model, *other.optimizer, options);
      expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
      return static_cast<double>(files.bytes) / static_cast<double>(needed);
    };
    const auto expect = [&](Training& other, int expected, const std::string& what, const fsdp::LoadOptions& options) {
      const auto found = readings(other, options);
      EXPECT_TRUE(expected - 0.1 < found && found < expected + 0.5) << what << ": " << found;
    };
    Training fresh({}, adamw(), 12, large);
    expect(fresh, 1, "new", strict);
    expect(fresh, 2, "loaded", strict);
    Training trained = trained_otherwise(large);
    expect(trained, 2, "trained", strict);
    expect(trained, 1, "not needed any more", {.check_first = false, .on_phase = strict.on_phase});
    expect(trained, 2, "still needed on one rank", {.check_first = rank == 0, .on_phase = strict.on_phase});
    expect(trained, 2, "what is missing is needed", {.strict = false, .check_first = false, .on_phase = strict.on_phase});
    Training lenient({}, adamw(), 12, large);
    expect(lenient, 2, "what is missing would be kept", {.strict = false, .on_phase = strict.on_phase});
    Training written({}, adamw(), 12, large);
    {
      const torch::NoGradGuard no_grad;
      written.model->parameters().front().mul_(2);
    }
    expect(written, 2, "an operator has written it", strict);
    Training replicated({.placements = fsdp::Placements::from_name("no_shard")}, adamw(), 12, large);
    expect(replicated, 2, "writes are not seen", strict);
    Training shown({}, adamw(), 12, large);
    if (rank == 0) shown.handle->parameter_shards();
    expect(shown, 2, "a user of one rank may have written it", strict);
    Training summoned({}, adamw(), 12, large);
    {
      const fsdp::SummonFullParams whole(*summoned.model);
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : summoned.model->parameters()) parameter.fill_(1);
    }
    expect(summoned, 2, "a user has written it", strict);
  });
}

}  // namespace damage_test
