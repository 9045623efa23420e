// Checkpoints that are damaged, and disks that begin to fail in the middle of a load: what a load needs of a checkpoint is checked before
// anything changes, and what it does not need is not looked at.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/commit.h"
#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "support/checkpoint_test.h"
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
    Training other({}, adamw(), 12, large);
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

// A disk that fails while a checkpoint is being checked changes nothing. One that fails later is the only fault that leaves a model that
// has to be loaded again; both are one error on every rank.
TEST_F(Damage, ADiskThatFailsInTheMiddle) {
  run_ranks(kRanks, [&](int rank) {
    Training run = trained_and_saved(path);
    Training other = trained_otherwise();
    bool ended = false;
    int unchanged = 0;
    int changed = 0;
    for (std::int64_t good = 0; !ended; good += good / 16 + 1) {
      SCOPED_TRACE(good);
      const bool torn = changed > 0;
      if (torn) {
        // Nobody computes with values of two models, or saves them.
        const std::string refusal = "a load of this model failed halfway";
        EXPECT_TRUE(has(message_of([&] { other.model->forward(fsdp::testing::stack_input(0, rank)); }), refusal));
        EXPECT_TRUE(has(message_of([&] { fsdp::save(path + "_torn", *other.model, *other.optimizer); }), refusal));
        EXPECT_TRUE(has(message_of([&] { other.optimizer->step(); }), refusal));
      }
      const auto before = torn ? decltype(other.handle->full_parameters())() : other.handle->full_parameters();
      FaultyFiles files;
      files.good_preads = good;
      if (rank == 1) files.pread_error = EIO;
      std::string message;
      {
        const fsdp::ckpt::ReplacedFileSystem replaced(files);
        message = message_of([&] { fsdp::load(path, *other.model, *other.optimizer); });
      }
      ended = message == "no error";
      if (has(message, "nothing was loaded:")) {
        ++unchanged;
        if (!torn) expect_same_bits(other.handle->full_parameters(), before);
      } else if (!ended) {
        ++changed;
        EXPECT_TRUE(message.starts_with("the checkpoint was whole, but then could not be read any more")) << message;
      }
      if (!ended) {
        EXPECT_TRUE(has(message, "rank 1: ") && has(message, "Input/output error")) << message;
      }
    }
    EXPECT_GT(unchanged, 0);
    EXPECT_GT(changed, 0);
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
    run.train(1, 2);
    other.train(1, 2);
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
  });
}

}  // namespace damage_test
