// Which checkpoints stay, and which one a run goes on from: by what was saved last, within one series of names.

#include "state/retention.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <future>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/files.h"
#include "checkpoint/steps.h"
#include "fsdp/save_load.h"
#include "support/faulty_files.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace retention_test {

using fsdp::testing::run_ranks;
using fsdp::testing::Training;

class Retention : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }
  std::vector<std::string> names() const { return fsdp::ckpt::list_folder(folder.path()); }
  fsdp::testing::TemporaryFolder folder;
};

TEST_F(Retention, AfterARollbackWhatIsSavedLastIsTheNewest) {
  run_ranks(1, [&] {
    Training run;
    for (std::int64_t step = 3; step <= 6; ++step) fsdp::save(path("step-" + std::to_string(step)), *run.model, {{"step", step}});
    fsdp::load(path("step-3"), *run.model);
    fsdp::save(path("step-4"), *run.model, {{"step", std::int64_t{4}}, {"again", true}}, {.keep_last = 2});
    EXPECT_EQ(names(), (std::vector<std::string>{"step-4", "step-6"}));
    const auto loaded = fsdp::load_latest(folder.path(), *run.model);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->path, path("step-4"));
    EXPECT_TRUE(loaded->extra.contains("again"));
    fsdp::save(path("step-1"), *run.model, {}, {.keep_last = 1});
    EXPECT_EQ(names(), std::vector<std::string>{"step-1"});
    EXPECT_EQ(fsdp::latest(folder.path()), path("step-1"));
  });
}

TEST_F(Retention, OnlyTheSameSeriesIsPruned) {
  run_ranks(1, [&] {
    Training run;
    for (const char* name : {"best-1", "step-1", "step-2", "7", "final"}) fsdp::save(path(name), *run.model);
    fsdp::save(path("step-3/"), *run.model, {}, {.keep_last = 1});
    EXPECT_EQ(names(), (std::vector<std::string>{"7", "best-1", "final", "step-3"}));
    fsdp::save(path("last"), *run.model, {}, {.keep_last = 1});
    EXPECT_EQ(names(), (std::vector<std::string>{"7", "best-1", "final", "last", "step-3"}));
  });
}

TEST_F(Retention, EveryNthAndTheBestStay) {
  run_ranks(1, [&] {
    Training run;
    const auto save = [&](int step, std::optional<double> metric, fsdp::SaveOptions options) {
      options.metric = metric;
      fsdp::save(path("step-" + std::to_string(step)), *run.model, {}, options);
    };
    EXPECT_EQ(fsdp::best(path("nowhere")), std::nullopt);
    for (int step = 1; step <= 9; ++step) save(step, {}, {.keep_last = 2, .keep_every = 4});
    EXPECT_EQ(fsdp::best(folder.path()), std::nullopt);  // None has a metric.
    EXPECT_EQ(names(), (std::vector<std::string>{"step-4", "step-8", "step-9"}));
    // What is there has no metric, and is not among the best.
    const std::vector<double> losses = {3, 1, 2, std::nan(""), 1, 5, 4};
    for (std::size_t i = 0; i < losses.size(); ++i) save(static_cast<int>(10 + i), losses[i], {.keep_last = 1, .keep_best = 2});
    EXPECT_EQ(names(), (std::vector<std::string>{"step-11", "step-14", "step-16"}));
    EXPECT_EQ(fsdp::best(folder.path()), path("step-14"));  // As good as step 11, and newer.
    EXPECT_EQ(fsdp::latest(folder.path()), path("step-16"));
    EXPECT_EQ(fsdp::load(path("step-11"), *run.model).metric, 1);
    // Both, and the best has just been saved.
    save(20, -1, {.keep_last = 1, .keep_every = 7, .keep_best = 1});
    EXPECT_EQ(names(), (std::vector<std::string>{"step-14", "step-20"}));
    for (const auto& [options, text] : {std::pair<fsdp::SaveOptions, const char*>{
                                            {.keep_every = 2}, "keep_every is 2; it keeps checkpoints in addition to the last ones"},
                                        {{.keep_best = 1}, "keep_best is 1; it keeps checkpoints in addition to the last ones"},
                                        {{.keep_last = 1, .keep_every = -1}, "keep_every is -1; give 0"}}) {
      const auto message = fsdp::testing::message_of([&, &options = options] { fsdp::save(path("step-21"), *run.model, {}, options); });
      EXPECT_NE(message.find(text), std::string::npos) << message;
    }
  });
}

// One that another saver has removed meanwhile is not among the best; one that cannot be read is an error.
TEST_F(Retention, TheBestAreOfThoseThatAreThere) {
  run_ranks(1, [&] {
    Training run;
    fsdp::save(path("step-1"), *run.model, {}, {.metric = 3});
    fsdp::save(path("step-2"), *run.model, {}, {.metric = 2});
    auto steps = fsdp::ckpt::find_steps(folder.path());
    std::filesystem::remove_all(path("step-2"));
    const fsdp::SaveOptions options = {.keep_last = 1, .keep_best = 1};
    EXPECT_EQ(fsdp::state::steps_that_stay(options, steps), std::vector<std::filesystem::path>{path("step-1")});
    fsdp::testing::FaultyFiles files;
    files.pread_error = EIO;
    const fsdp::ckpt::ReplacedFileSystem replaced(files);
    const auto message = fsdp::testing::message_of([&] { fsdp::state::steps_that_stay(options, {steps.front()}); });
    EXPECT_NE(message.find("Input/output error"), std::string::npos) << message;
  });
}

// As a save upon SIGTERM does beside an AsyncSaver that is in the middle of writing.
TEST_F(Retention, ASaveLeavesAloneWhatAnotherOneIsWriting) {
  run_ranks(1, [&] {
    Training run;
    std::promise<void> is_writing;
    std::promise<void> may_go_on;
    std::atomic<int> metadata_files = 0;
    fsdp::testing::FaultyFiles files;
    files.before = [&](const std::string& call, const std::string& file) {
      if (call != "create" || !file.ends_with("/.metadata") || metadata_files++ > 0) return;
      is_writing.set_value();
      may_go_on.get_future().wait();
    };
    const fsdp::ckpt::ReplacedFileSystem replaced(files);
    fsdp::AsyncSaver saver(*run.model, run.optimizer.get());
    saver.save(path("step-1"), {}, {.keep_last = 2});
    is_writing.get_future().wait();
    fsdp::save(path("step-2"), *run.model, *run.optimizer, {}, {.keep_last = 2});
    may_go_on.set_value();
    saver.wait();
    EXPECT_EQ(names(), (std::vector<std::string>{"step-1", "step-2"}));
    for (const auto& name : names()) fsdp::ckpt::verify_step(path(name));
  });
}

TEST_F(Retention, AnExportReplacesNothing) {
  run_ranks(2, [&] {
    Training run;
    fsdp::save(path("step-1"), *run.model, *run.optimizer);
    const auto message = fsdp::testing::message_of([&] { fsdp::export_safetensors(path("step-1"), *run.model); });
    EXPECT_TRUE(fsdp::testing::has(message, path("step-1") + " is there already, and what is written here replaces nothing")) << message;
    run.mesh.barrier();
    EXPECT_EQ(names(), std::vector<std::string>{"step-1"});
    fsdp::ckpt::verify_step(path("step-1"));
  });
}

TEST_F(Retention, AFaultWhileCleaningUpHidesNothing) {
  run_ranks(1, [&] {
    Training run;
    fsdp::testing::FaultyFiles files;
    files.fsync_error = EIO;
    files.unlink_error = EACCES;
    const fsdp::ckpt::ReplacedFileSystem replaced(files);
    for (const auto& message : {fsdp::testing::message_of([&] { fsdp::save(path("1"), *run.model); }),
                                fsdp::testing::message_of([&] { fsdp::export_safetensors(path("2"), *run.model); })}) {
      EXPECT_TRUE(fsdp::testing::has(message, "Input/output error")) << message;
      EXPECT_FALSE(fsdp::testing::has(message, "Permission denied")) << message;
    }
  });
}

}  // namespace retention_test
