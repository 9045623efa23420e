#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <future>
#include <map>
#include <string>
#include <vector>

#include "example/train_gpt_program.h"
#include "fsdp/save_load.h"
#include "support/same_bits.h"

namespace fsdp {
namespace train_gpt_test {

// A free port that is reserved as long as this lives, as in tests/python/support/ports.py.
class ReservedPort {
 public:
  ReservedPort() {
    const int reuse = 1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
    bind(fd_, reinterpret_cast<sockaddr*>(&address), length);
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
    number_ = ntohs(address.sin_port);
  }
  ~ReservedPort() { close(fd_); }
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  int number() const { return number_; }

 private:
  int fd_ = socket(AF_INET, SOCK_STREAM, 0);
  int number_ = 0;
};

void expect_usage_error(const Outcome& outcome, const std::string& message) {
  EXPECT_EQ(outcome.exit_code, 2) << message;
  EXPECT_EQ(outcome.errors, "train_gpt: " + message + "\n");
  EXPECT_EQ(outcome.output, "");
}

TEST_F(TrainGpt, ExplainsItself) {
  const auto outcome = run("help", {"--help"});
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.errors, "");
  for (const char* option : {"--data", "--nproc", "--steps", "--strategy", "--log", "torchrun"}) {
    EXPECT_NE(outcome.output.find(option), std::string::npos) << option;
  }
}

TEST_F(TrainGpt, RejectsWrongOptionsWithOneLine) {
  expect_usage_error(run("unknown", {"--stpes", "3"}), "The following arguments were not expected: 3 --stpes");
  expect_usage_error(run("strategy", {"--strategy", "zero3"}), "--strategy: zero3 not in {no_shard,optim,optim_grads,optim_grads_params}");
  expect_usage_error(run("heads", {"--dim", "10", "--heads", "3"}), "--dim 10 does not divide into --heads 3 of even width");
  expect_usage_error(run("ranks", {"--nproc", "9"}), "more ranks (9) than sequences per step (--batch 4)");
  expect_usage_error(run("divide", {"--nproc", "3"}), "--batch 4 does not divide over 3 ranks");
  expect_usage_error(run("batch", {"--batch", "0"}), "--batch must be positive");
  expect_usage_error(run("log", tiny({"--log", "/nowhere/log.jsonl"})), "cannot write --log /nowhere/log.jsonl");
}

TEST_F(TrainGpt, RejectsDataThatItCannotUseWithOneLine) {
  expect_usage_error(run("none", {"--data", "/nowhere"}), "/nowhere does not exist");
  const std::string binary = folder_.write("binary", std::string(100, '\0'));
  expect_usage_error(run("binary", {"--data", binary}), binary + " is not a text file");
  const std::string small = folder_.write("small", std::string(199, 'x'));
  expect_usage_error(run("small", {"--data", small, "--context", "16"}),
                     small + " is too small: its validation part has 10 bytes, and --context 16 needs more");
}

TEST_F(TrainGpt, TrainsOnTwoRanks) {
  const auto outcome = run("two", tiny({"--nproc", "2", "--log", log("two"), "--prompt", "the "}));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_EQ(outcome.errors, "");
  EXPECT_NE(outcome.output.find("over 2 ranks"), std::string::npos) << outcome.output;
  EXPECT_NE(outcome.output.find("--- sample ---\nthe "), std::string::npos) << outcome.output;

  const auto all = rows("two");
  ASSERT_EQ(all.size(), 1u + 12 + 2 + 1 + 1);  // start, steps, the times of each half of them, one validation between them, end
  EXPECT_EQ(all.front()["ranks"], 2);
  std::int64_t step = 0;
  for (const auto& row : all) {
    if (!row.contains("loss")) continue;
    EXPECT_EQ(row["step"], ++step);
    EXPECT_TRUE(std::isfinite(row["loss"].get<double>())) << row;
    EXPECT_GT(row["tokens_per_second"], 0) << row;
    EXPECT_GT(row["lr"], 0) << row;
    EXPECT_GT(row["peak_mib"], 0) << row;
  }
  EXPECT_EQ(step, 12);
  const auto values = losses("two");
  EXPECT_NEAR(values.front(), std::log(256.0), 0.2);
  EXPECT_LT(values.back(), values.front() - 1);

  for (const auto& times : {all[7], all[15]}) {
    EXPECT_EQ(times["steps"], 6);
    double waits = 0;
    for (const auto& [reason, ms] : times["waits"].items()) waits += ms.get<double>();
    EXPECT_NEAR(waits, times["exposed_ms"].get<double>(), 1e-6);
    EXPECT_NEAR(waits + times["compute_ms"].get<double>(), times["step_ms"].get<double>(), 1e-6);
  }
  EXPECT_NE(outcome.output.find("; waits "), std::string::npos) << outcome.output;

  EXPECT_GT(all[8]["validation_bits_per_byte"], all.back()["validation_bits_per_byte"]);
  EXPECT_GT(all.back()["validation_bits_per_byte"], 0);
  EXPECT_GT(all.back()["seconds"], 0);
  const auto sample = all.back()["sample"].get<std::string>();
  EXPECT_EQ(sample.substr(0, 4), "the ");
  EXPECT_GT(sample.size(), 4u);
}

TEST_F(TrainGpt, GivesTheSameLossesAgainAndOnOneRank) {
  for (const char* name : {"first", "again"}) {
    ASSERT_EQ(run(name, tiny({"--nproc", "2", "--log", log(name)})).exit_code, 0);
  }
  ASSERT_EQ(run("alone", tiny({"--nproc", "1", "--log", log("alone")})).exit_code, 0);
  const auto first = losses("first");
  const auto alone = losses("alone");
  ASSERT_EQ(first.size(), 12u);
  ASSERT_EQ(alone.size(), 12u);
  EXPECT_EQ(losses("again"), first);
  EXPECT_EQ(rows("again").back()["sample"], rows("first").back()["sample"]);
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_NEAR(alone[i], first[i], 1e-4) << "step " << i + 1;
}

TEST_F(TrainGpt, GivesTheSameLossesForEveryStrategy) {
  std::map<std::string, std::vector<double>> by_strategy;
  for (const char* strategy : {"no_shard", "optim", "optim_grads", "optim_grads_params"}) {
    ASSERT_EQ(run(strategy, tiny({"--strategy", strategy, "--steps", "4", "--log", log(strategy)})).exit_code, 0);
    by_strategy[strategy] = losses(strategy);
  }
  for (const auto& [strategy, values] : by_strategy) EXPECT_EQ(values, by_strategy["no_shard"]) << strategy;
}

TEST_F(TrainGpt, MeshesDtypesAndOptimizersAreOptions) {
  const auto train = [&](const std::string& name, const std::vector<std::string>& more) {
    auto arguments = tiny({"--nproc", "4", "--log", log(name)});
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto outcome = run(name, arguments);
    EXPECT_EQ(outcome.exit_code, 0) << name << ": " << outcome.errors;
    return losses(name);
  };
  const auto plain = train("plain", {});
  ASSERT_EQ(plain.size(), 12u);
  EXPECT_EQ(train("hsdp", {"--outer", "2"}), plain);
  EXPECT_EQ(train("hfsdp", {"--outer", "2", "--outer-strategy", "optim"}), plain);
  EXPECT_EQ(train("checkpoint", {"--checkpoint"}), plain);
  EXPECT_EQ(train("offload", {"--offload", "all"}), plain);
  EXPECT_EQ(train("offload_optimizer", {"--offload", "optimizer"}), plain);
  EXPECT_EQ(train("keep_gathered", {"--keep-gathered", "1MiB"}), plain);
  const auto expect_near = [&](const std::vector<double>& values, const std::vector<double>& expected, double tolerance) {
    ASSERT_EQ(values.size(), expected.size());
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], expected[i], tolerance) << "step " << i + 1;
  };
  const auto of_eight = train("eight", {"--batch", "8"});
  expect_near(train("accumulate", {"--batch", "8", "--accumulate", "2"}), of_eight, 1e-4);
  expect_near(train("bf16", {"--param-dtype", "bf16", "--wire-dtype", "bf16"}), plain, 0.1);
  expect_near(train("float8", {"--param-dtype", "bf16", "--float8-gather"}), plain, 0.2);
  expect_near(train("adamw8bit", {"--optimizer", "adamw8bit"}), plain, 0.1);
  const auto muon = train("muon", {"--optimizer", "muon"});
  EXPECT_LT(muon.back(), muon.front() - 1);
}

TEST_F(TrainGpt, AResumedRunIsTheSame) {
  const auto saves = [&](const std::string& name) { return (folder_.path() / name).string(); };
  const auto train = [&](const std::string& name, const std::string& folder, const std::vector<std::string>& more) {
    auto arguments = tiny({"--save", saves(folder), "--save-every", "4", "--keep-last", "0", "--log", log(name)});
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(name, arguments);
  };
  ASSERT_EQ(train("whole", "whole", {}).exit_code, 0);
  const auto whole = losses("whole");
  ASSERT_EQ(whole.size(), 12U);
  std::filesystem::create_directories(saves("again"));
  std::filesystem::copy(saves("whole") + "/step-4", saves("again") + "/step-4", std::filesystem::copy_options::recursive);
  // A half-written one is no checkpoint.
  std::filesystem::create_directories(saves("again") + "/step-8");
  const auto resumed = train("again", "again", {"--resume", "auto"});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
  EXPECT_NE(resumed.output.find("resumed from " + saves("again") + "/step-4"), std::string::npos) << resumed.output;
  EXPECT_EQ(losses("again"), std::vector<double>(whole.begin() + 4, whole.end()));
  const auto expected = trained(saves("whole") + "/step-12");
  const auto found = trained(saves("again") + "/step-12");
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) EXPECT_TRUE(fsdp::testing::same_bits(tensor, found.at(name))) << name;

  // On more ranks, and sharded otherwise: the same but for rounding.
  const auto wider =
      train("wider", "wider", {"--resume", saves("whole") + "/step-4", "--nproc", "4", "--outer", "2", "--outer-strategy", "optim"});
  EXPECT_EQ(wider.exit_code, 0) << wider.errors;
  const auto others = losses("wider");
  ASSERT_EQ(others.size(), 8U);
  for (std::size_t i = 0; i < others.size(); ++i) EXPECT_NEAR(others[i], whole[i + 4], 1e-3) << "step " << i + 5;

  // Nothing is left to do.
  const auto done = train("done", "whole", {"--resume", "auto"});
  EXPECT_EQ(done.exit_code, 0) << done.errors;
  EXPECT_TRUE(losses("done").empty());
  // Another model.
  const auto other = train("other", "other", {"--resume", saves("whole") + "/step-4", "--dim", "32"});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_NE(other.errors.find("has shape"), std::string::npos) << other.errors;
}

TEST_F(TrainGpt, SigtermSavesAndEndsWell) {
  const auto saves = (folder_.path() / "saves").string();
  // To the program alone: it tells its ranks.
  const auto outcome =
      run_and_signal("ended", tiny({"--save", saves, "--log", log("ended"), "--steps", "100000"}), log("ended"), "pkill -TERM -P $pid");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
  const auto all = rows("ended");
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all.back().value("ended", ""), "by a signal") << all.back();
  const auto step = all.back()["step"].get<std::int64_t>();
  EXPECT_EQ(fsdp::latest(saves), saves + "/step-" + std::to_string(step));
}

TEST_F(TrainGpt, RejectsOptionsThatDoNotFitTogether) {
  expect_usage_error(run("outer", {"--nproc", "4", "--outer", "3"}), "--outer 3 does not divide 4 ranks");
  expect_usage_error(run("parts", {"--nproc", "4", "--accumulate", "3"}),
                     "each rank's 1 sequences of --batch 4 do not divide into --accumulate 3");
  expect_usage_error(run("hfsdp", {"--outer-strategy", "optim"}),
                     "--outer-strategy optim needs --outer of at least 2 and --strategy optim_grads_params");
  expect_usage_error(run("resume", {"--resume", "auto"}),
                     "--resume auto looks for the newest checkpoint of --run, or in --save: give one of them, too");
  expect_usage_error(run("reshard", {"--strategy", "optim", "--no-reshard-after-forward"}),
                     "--no-reshard-after-forward needs --strategy optim_grads_params: with optim, parameters stay whole anyway");
}

TEST_F(TrainGpt, RunsAsARankOfAnotherLauncher) {
  const auto run_both = [&](const std::string& name, const std::vector<std::string>& arguments) {
    const ReservedPort port;
    const std::string meeting_point = " WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(port.number());
    auto other = std::async(std::launch::async, [&] { return run(name + "1", arguments, "RANK=1" + meeting_point); });
    const auto rank0 = run(name + "0", arguments, "RANK=0" + meeting_point);
    return std::vector{rank0, other.get()};
  };
  // --nproc is ignored.
  const auto outcomes = run_both("rank", tiny({"--nproc", "4", "--log", log("launched")}));
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_code, 0);
    EXPECT_EQ(outcome.errors, "");
  }
  EXPECT_NE(outcomes[0].output.find("done: 12 steps"), std::string::npos) << outcomes[0].output;
  EXPECT_EQ(outcomes[1].output, "");
  EXPECT_EQ(losses("launched").size(), 12u);

  const auto wrong = run_both("wrong", tiny({"--batch", "1"}));
  expect_usage_error(wrong[0], "more ranks (2) than sequences per step (--batch 1)");
  EXPECT_EQ(wrong[1].exit_code, 2);
  EXPECT_EQ(wrong[1].errors, "");
}

}  // namespace train_gpt_test
}  // namespace fsdp
