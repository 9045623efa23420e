// What an asynchronous save takes from the process as a whole is what it was when save() was called.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>

#include "fsdp/fsdp.h"
#include "support/checkpoint_test.h"
#include "support/messages.h"
#include "support/multi_rank.h"

namespace later_test {

namespace fs = std::filesystem;

using fsdp::testing::has;
using fsdp::testing::line;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;

using Later = fsdp::testing::CheckpointTest;

// The training may go on in another folder, on one rank or on all, while the thread has not begun yet.
TEST_F(Later, ARelativePathIsTheCallers) {
  for (const bool all : {false, true}) {
    const fs::path here = path(all ? "all" : "one");
    fs::create_directories(here / "elsewhere");
    run_ranks(2, [&](int rank) {
      fs::current_path(here);
      torch::nn::Linear model(3, 2);
      const auto mesh = line();
      fsdp::fully_shard(*model, {.mesh = mesh});
      fsdp::AsyncSaver saver(*model);
      // kCollect ends before the thread begins.
      saver.save("runs/step-1", {}, {.keep_last = 1, .on_phase = [&](const fsdp::PhaseReport& report) {
                                       if (report.phase == fsdp::Phase::kCollect && (all || rank == 0))
                                         fs::current_path(here / "elsewhere");
                                     }});
      saver.wait();
      mesh.barrier();
      EXPECT_TRUE(fs::exists(here / "runs" / "step-1"));
      EXPECT_TRUE(fs::is_empty(here / "elsewhere"));
    });
  }
}

// An error that needs no disk comes from the call, not from the next one.
TEST_F(Later, OptionsAreCheckedAtOnce) {
  run_ranks(2, [&] {
    torch::nn::Linear model(3, 2);
    fsdp::fully_shard(*model, {.mesh = line()});
    fsdp::AsyncSaver saver(*model);
    EXPECT_TRUE(has(message_of([&] { saver.save(path("1"), {}, {.keep_last = 1, .keep_every = -1}); }), "keep_every is -1"));
    saver.wait();
    saver.save(path("1"));
    saver.wait();
  });
}

}  // namespace later_test
