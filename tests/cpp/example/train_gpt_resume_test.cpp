#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "example/train_gpt_program.h"
#include "fsdp/fsdp.h"
#include "support/messages.h"

// Going on with a run of train_gpt: what is refused, and that nothing of a run changes by what fails.
namespace fsdp {
namespace train_gpt_test {

namespace fs = std::filesystem;

using testing::has;

class TrainGptResume : public TrainGpt {
 protected:
  /// All files below a folder, with what is in them.
  static std::map<std::string, std::string> contents(const fs::path& folder) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (entry.is_regular_file()) files[entry.path()] = read(entry.path());
    }
    return files;
  }

  /// A run of 12 steps, with checkpoints after 6 and 12.
  void train(const std::string& name) const { ASSERT_EQ(run(name, tiny({"--run", run_folder(name)})).exit_code, 0); }

  std::string checkpoints(const std::string& name) const { return run_folder(name) + "/checkpoints"; }

  /// One line, no training, and nothing in the folder of the test but what was there.
  void expect_refusal(const std::vector<std::string>& arguments, const std::string& error, const std::string& environment = "") const {
    const auto before = contents(folder_.path());
    const auto outcome = run("refused", arguments, environment);
    EXPECT_EQ(outcome.exit_code, 2) << error;
    EXPECT_EQ(outcome.errors.find("train_gpt: "), 0U) << outcome.errors;
    EXPECT_TRUE(has(outcome.errors, error)) << outcome.errors;
    EXPECT_EQ(std::count(outcome.errors.begin(), outcome.errors.end(), '\n'), 1) << outcome.errors;
    EXPECT_EQ(outcome.output, "");
    for (const char* file : {"refused.out", "refused.err"}) fs::remove(folder_.path() / file);
    EXPECT_TRUE(contents(folder_.path()) == before) << error;
    EXPECT_FALSE(fs::exists(folder_.path() / "runs"));
  }
};

TEST_F(TrainGptResume, WhatIsRefusedChangesNothing) {
  train("run");
  const auto folder = run_folder("run");
  for (const auto& [option, value] :
       std::vector<std::pair<std::string, std::string>>{{"--dim", "32"}, {"--heads", "1"}, {"--context", "16"}, {"--optimizer", "muon"}}) {
    expect_refusal({"--resume", folder, option, value},
                   option + " " + value + " does not fit " + folder + ", whose checkpoints were saved with " + option + " ");
  }
  expect_refusal({"--resume", "auto", "--run", folder, "--dim", "32"}, "saved with --dim 16: leave it out, or begin a new run");
  expect_refusal({"--generate", folder, "--layers", "3"}, "--layers 3 does not fit " + folder);
  expect_refusal({"--resume", folder, "--nproc", "3"}, "--batch 4 does not divide over 3 ranks");
  // What the ranks of another launcher find out.
  expect_refusal({"--resume", folder, "--accumulate", "3"}, "do not divide into --accumulate 3", "RANK=0 WORLD_SIZE=1");
  expect_refusal({"--resume", folder, "--dim", "32"}, "--dim 32 does not fit", "RANK=0 WORLD_SIZE=1");

  // It is as it was, and what writes no text and loads nothing may differ.
  EXPECT_EQ(run("more", {"--resume", folder, "--steps", "13", "--lr", "0.02", "--nproc", "1"}).exit_code, 0);
  EXPECT_EQ(run("text", {"--generate", folder}).exit_code, 0);
}

TEST_F(TrainGptResume, ALoadThatFailsChangesNothing) {
  train("run");
  for (const auto& checkpoint : fs::directory_iterator(checkpoints("run"))) fs::resize_file(checkpoint.path() / "__0_0.distcp", 100);
  const auto before = contents(run_folder("run"));
  const auto outcome = run("resumed", {"--resume", run_folder("run"), "--steps", "20", "--nproc", "4"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.errors.find("ranks 0-3 failed: no checkpoint in " + checkpoints("run") + " is intact"), 0U) << outcome.errors;
  auto after = contents(run_folder("run"));
  EXPECT_EQ(after.erase(run_folder("run") + "/.lock"), 1U);  // which says who was the last
  auto expected = before;
  expected.erase(run_folder("run") + "/.lock");
  EXPECT_TRUE(after == expected);
}

TEST_F(TrainGptResume, SaysWhatIsAtThePlace) {
  train("run");
  const auto folder = run_folder("run");
  const auto six = checkpoints("run") + "/step-6";
  expect_refusal({"--resume", folder_.path() / "none"}, "is neither the folder of a run nor a checkpoint: there is nothing");
  expect_refusal({"--resume", data()}, "it holds no checkpoint, and no config.json of a run");
  expect_refusal({"--resume", checkpoints("run")}, "it holds the checkpoints step-6, step-12 of the run " + folder);
  expect_refusal({"--generate", checkpoints("run")}, "it holds the checkpoints step-6, step-12 of the run " + folder);
  expect_refusal({"--generate", six}, "is not the folder of a run: it is a checkpoint of the run " + folder);
  expect_refusal(tiny({"--run", six, "--resume", "auto"}), "it is a checkpoint of the run " + folder);
  expect_refusal(tiny({"--save", six, "--resume", "auto"}), "can't be a folder for checkpoints: it is a checkpoint");

  // A new run from a checkpoint needs the options of the run that saved it.
  expect_refusal({"--data", data(), "--resume", six, "--layers", "2"}, "give --dim 16 --heads 2 --context 32, too, as its run " + folder);
  // A config.json of another program, where that of a run would lie, is none.
  const std::string copy = folder_.path() / "model/checkpoints/copied";
  fs::create_directories(copy);
  fs::copy(six, copy, fs::copy_options::recursive);
  std::ofstream(folder_.path() / "model/config.json") << R"({"model_type": "llama", "num_hidden_layers": 126})";
  const auto copied = run("copied", tiny({"--resume", copy, "--optimizer", "muon"}));
  EXPECT_EQ(copied.exit_code, 1);
  EXPECT_TRUE(has(copied.errors, "copied was saved with other options than --dim 16 --layers 2 --heads 2 --context 32 ")) << copied.errors;
  EXPECT_TRUE(has(copied.errors, "--optimizer muon: give the model and the optimizer of the run that saved it\n")) << copied.errors;
  EXPECT_FALSE(has(copied.errors, "LoadOptions")) << copied.errors;
  const std::string model = folder_.path() / "model";
  expect_refusal({"--resume", model}, "it holds no checkpoint, and no config.json of a run");
  expect_refusal(tiny({"--run", model}), "can't be the folder of a run: it has a config.json that is not of a run");
  EXPECT_FALSE(fs::exists(folder_.path() / "runs"));
}

TEST_F(TrainGptResume, AFinishedRunSaysThatNothingIsLeft) {
  train("run");
  const auto before = contents(run_folder("run"));
  const auto outcome = run("again", {"--resume", run_folder("run")});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_EQ(outcome.output,
            "nothing is left to train: " + checkpoints("run") + "/step-12 has made 12 steps of 12 steps; for more, raise --steps\n");
  auto after = contents(run_folder("run"));
  after.erase(run_folder("run") + "/.lock");
  EXPECT_EQ(after.size(), before.size() - 1);
  for (const auto& [path, text] : after) EXPECT_TRUE(before.at(path) == text) << path;
}

TEST_F(TrainGptResume, OneProcessTrainsInAFolder) {
  const auto folder = run_folder("run");
  const auto log = folder + "/log.jsonl";
  // Another one, beside it and after its end, which it has no chance to notice. Its ranks end a moment after it.
  const std::string others = "(" + command_of({"--resume", folder}) +
                             "); echo \"beside it: $?\"; pkill -KILL -P $pid; wait $pid; sleep 1; (" +
                             command_of({"--resume", folder, "--steps", "8"}) + "); echo \"after it: $?\"";
  const auto outcome = run_and_signal("run", tiny({"--run", folder, "--steps", "100000", "--save-every", "5"}), log, others);
  EXPECT_TRUE(has(outcome.output, "beside it: 2\n") && has(outcome.output, "after it: 0\n")) << outcome.output << outcome.errors;
  EXPECT_TRUE(has(outcome.errors, "train_gpt: another training goes on in " + folder + " (process ")) << outcome.errors;

  // Two that begin at once.
  const auto begin = [&](const std::string& name) { return run(name, tiny({"--run", run_folder("both"), "--steps", "60"})); };
  auto second = std::async(std::launch::async, [&] { return begin("second"); });
  const std::vector outcomes = {begin("first"), second.get()};
  const auto good = std::count_if(outcomes.begin(), outcomes.end(), [](const Outcome& outcome) { return outcome.exit_code == 0; });
  EXPECT_EQ(good, 1);
  EXPECT_TRUE(has(outcomes[0].errors + outcomes[1].errors, run_folder("both"))) << outcomes[0].errors << outcomes[1].errors;
  std::vector<std::int64_t> steps;
  for (const auto& row : rows("both")) {
    if (row.contains("loss")) steps.push_back(row["step"].get<std::int64_t>());
  }
  ASSERT_EQ(steps.size(), 60U);
  for (std::size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i], static_cast<std::int64_t>(i) + 1);
}

TEST_F(TrainGptResume, StepsAndMinutesLimitTogether) {
  const auto saved = [&](const std::string& name) { return Json::parse(read(run_folder(name) + "/config.json")); };
  ASSERT_EQ(run("steps", tiny({"--run", run_folder("steps")})).exit_code, 0);
  EXPECT_EQ(saved("steps")["minutes"], 0);  // However long they take.
  const auto both = run("both", tiny({"--run", run_folder("both"), "--steps", "1000000", "--minutes", "0.03"}));
  ASSERT_EQ(both.exit_code, 0) << both.errors;
  EXPECT_TRUE(has(both.output, "trains for 1000000 steps, or 0.03 minutes if they take longer")) << both.output;
  EXPECT_LT(losses("both").size(), 1000000U);
  const auto done = run("done", {"--resume", run_folder("both")});
  EXPECT_TRUE(has(done.output, "for more, raise --minutes")) << done.output;
}

}  // namespace train_gpt_test
}  // namespace fsdp
