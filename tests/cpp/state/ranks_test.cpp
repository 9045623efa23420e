// The ranks of a save or a load speak in few messages, the first one reads for all what all need alike, and its failure is everybody's.

#include "state/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <variant>

#include "checkpoint/dcp_metadata.h"
#include "checkpoint/records.h"
#include "fsdp/save_load.h"
#include "support/counting_files.h"
#include "support/edited_checkpoint.h"
#include "support/faulty_files.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace ranks_test {

namespace ckpt = fsdp::ckpt;
namespace fs = std::filesystem;

using fsdp::testing::adamw;
using fsdp::testing::CountingFiles;
using fsdp::testing::expect_same_bits;
using fsdp::testing::FaultyFiles;
using fsdp::testing::has;
using fsdp::testing::line;
using fsdp::testing::message_of;
using fsdp::testing::plane;
using fsdp::testing::run_ranks;
using fsdp::testing::Training;

class CheckpointRanks : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }
  fsdp::testing::TemporaryFolder folder;
};

/// What this rank sends in `work`, but for headers.
template <typename Work>
std::int64_t messages_of(const fsdp::DeviceMesh& mesh, const Work& work) {
  for (const auto& dim : mesh.dims()) mesh.communicator(dim.name)->reset_stats();
  work();
  std::int64_t messages = 0;
  for (const auto& dim : mesh.dims()) {
    const auto& stats = mesh.communicator(dim.name)->stats();
    EXPECT_EQ(stats.scatters + stats.all_gathers + stats.reduce_scatters, 0);
    messages += stats.control_messages;
  }
  return messages;
}

TEST_F(CheckpointRanks, LoadOneCheckpointAndNoMixtureOfTwo) {
  run_ranks(2, [&](int rank) {
    Training run({.mesh = line()});
    for (const std::string step : {"step-1", "step-2"}) {
      run.train(0, 1);
      fsdp::save(path(step), *run.model, *run.optimizer);
    }
    const auto before = run.handle->full_parameters();
    const auto message = message_of([&] { fsdp::load(path("step-" + std::to_string(1 + rank)), *run.model, *run.optimizer); });
    EXPECT_TRUE(has(message, "rank 1: ")) << message;
    EXPECT_TRUE(has(message, "step-2 is another checkpoint than rank 0 reads")) << message;
    const auto after = run.handle->full_parameters();
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(after[i].second, before[i].second));
  });
}

TEST_F(CheckpointRanks, LeaveNothingBehindASaveThatOneRankRefuses) {
  run_ranks(2, [&](int rank) {
    Training run({.mesh = line()});
    run.train(0, 1);
    const auto message = message_of([&] { fsdp::save(path("step-1"), *run.model, {}, {.keep_last = rank == 1 ? -1 : 0}); });
    EXPECT_TRUE(has(message, "keep_last is -1")) << message;
    run.mesh.barrier();
    EXPECT_TRUE(fs::is_empty(folder.path()));
  });
}

// Agreeing takes one message a round, a text of the first rank two, what each rank tells the first one a round of lengths and one message.
TEST_F(CheckpointRanks, SendMessagesByTheLogarithmOfTheirNumber) {
  for (const int ranks : {2, 3, 4}) {
    for (const bool rows : {false, true}) {
      if (rows && ranks != 4) continue;
      const auto name = std::to_string(ranks) + (rows ? " in rows" : "");
      SCOPED_TRACE(name);
      run_ranks(ranks, [&](int rank) {
        Training run({.mesh = rows ? plane() : line()});
        run.train(0, 1);
        const auto rounds = std::bit_width(static_cast<unsigned>(ranks - 1));
        const auto expect_messages = [&](std::int64_t of_a_round, const auto& work) {
          const auto messages = messages_of(run.mesh, work);
          if (rank == 0) {
            EXPECT_EQ(messages, of_a_round * rounds);
          }
          EXPECT_LE(messages, of_a_round * rounds);
        };
        expect_messages(5 + 2 + 1, [&] { fsdp::save(path(name), *run.model, *run.optimizer); });
        expect_messages(4 + 2, [&] { fsdp::load(path(name), *run.model, *run.optimizer); });
        expect_messages(4 + 2, [&] { fsdp::load(path(name), *run.model); });
      });
    }
  }
}

// As Python leaves it: blocks with checksums would stay in memory, and many counts with them.
TEST_F(CheckpointRanks, ReadCountsOfUpdatesOnce) {
  for (const int ranks : {2, 4}) {
    SCOPED_TRACE(ranks);
    run_ranks(ranks, [&](int rank) {
      const auto step = path(std::to_string(ranks));
      Training run;
      run.train(0, 3);
      fsdp::save(step, *run.model, *run.optimizer);
      if (rank == 0) fsdp::testing::edit_metadata(step, [](ckpt::DcpMetadata&) {});
      run.mesh.barrier();
      Training other({}, adamw(), 12);
      other.train(0, 1);
      const auto preads_of = [&](fsdp::LoadOptions options) {
        CountingFiles files;
        const ckpt::ReplacedFileSystem replaced(files);
        fsdp::load(step, *other.model, *other.optimizer, std::move(options));
        return files.preads;
      };
      const auto without = preads_of({.ignore = [](const std::string& name) { return name.ends_with(".step"); }});
      const auto with = preads_of({});
      const auto counts = static_cast<int>(run.handle->full_parameters().size());
      if (rank == 0) {
        EXPECT_GE(with - without, counts);
      } else {
        EXPECT_EQ(with, without);
      }
      // They have reached all: AdamW's next update depends on them.
      run.train(3, 4);
      other.train(3, 4);
      expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
    });
  }
}

/// Where the data of a tensor's one record are.
std::pair<fs::path, std::int64_t> data_of(const fs::path& step, const std::string& name) {
  const auto metadata = ckpt::read_dcp_metadata(fsdp::testing::read_file(step / ckpt::kMetadataFile), "metadata");
  for (const auto& item : metadata.items) {
    if (item.name != name) continue;
    const auto& chunk = std::get<ckpt::DcpTensor>(item.content).chunks.at(0);
    const auto file = step / chunk.record.file;
    return {file, ckpt::locate_tensor(ckpt::File::open(file).reader(), chunk.record, name).offset};
  }
  throw fsdp::Error("no " + name);
}

// As Python leaves it, without checksums of blocks: nobody but the first rank looks at the record.
TEST_F(CheckpointRanks, ACountThatIsDamagedEndsAll) {
  for (const int ranks : {2, 4}) {
    SCOPED_TRACE(ranks);
    run_ranks(ranks, [&](int rank) {
      const auto step = path(std::to_string(ranks));
      Training run;
      run.train(0, 1);
      fsdp::save(step, *run.model, *run.optimizer);
      if (rank == 0) {
        fsdp::testing::edit_metadata(step, [](ckpt::DcpMetadata&) {});
        const auto [file, offset] = data_of(step, "optim.state.head.weight.step");
        fsdp::testing::flip_bit(file, offset, 1);
      }
      run.mesh.barrier();
      run.train(1, 2);
      const auto before = run.handle->full_parameters();
      const auto message = message_of<ckpt::DamageError>([&] { fsdp::load(step, *run.model, *run.optimizer); });
      EXPECT_TRUE(message.starts_with("nothing was loaded:\n  rank 0: ")) << message;
      EXPECT_TRUE(has(message, "'optim.state.head.weight.step'") && !has(message, "rank 1")) << message;
      expect_same_bits(run.handle->full_parameters(), before);
      fsdp::load(step, *run.model);
    });
  }
}

TEST_F(CheckpointRanks, AFirstRankThatCannotReadEndsAll) {
  run_ranks(4, [&](int rank) {
    Training run;
    run.train(0, 1);
    fsdp::save(path("1"), *run.model, *run.optimizer);
    int failed = 0;
    for (std::int64_t good = 0;; good += good / 4 + 1) {
      SCOPED_TRACE(good);
      FaultyFiles files;
      if (rank == 0) {
        files.good_preads = good;
        files.pread_error = EIO;
      }
      const ckpt::ReplacedFileSystem replaced(files);
      const auto message = message_of([&] { fsdp::load(path("1"), *run.model, *run.optimizer); });
      if (!message.starts_with("nothing was loaded:")) break;
      EXPECT_TRUE(message.starts_with("nothing was loaded:\n  rank 0: cannot")) << message;
      EXPECT_TRUE(has(message, "Input/output error") && !has(message, "rank 1")) << message;
      ++failed;
    }
    EXPECT_GT(failed, 5);
    fsdp::load(path("1"), *run.model, *run.optimizer);
  });
}

}  // namespace ranks_test
