#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "example/train_gpt_program.h"
#include "fsdp/fsdp.h"
#include "gpt.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "train_gpt/generate.h"

// The folders of train_gpt's runs: what is in them, and what can be done with them.
namespace fsdp {
namespace train_gpt_test {

namespace fs = std::filesystem;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

void expect_same_checkpoint(const fs::path& path, const fs::path& expected_path) {
  const auto expected = trained(expected_path);
  const auto found = trained(path);
  ASSERT_GT(expected.size(), 0U);
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) EXPECT_TRUE(fsdp::testing::same_bits(tensor, found.at(name))) << name;
}

class TrainGptRuns : public TrainGpt {};

TEST_F(TrainGptRuns, EachHasAFolderOfItsOwn) {
  for (const char* name : {"first", "second"}) {
    const auto outcome = run(name, tiny({}));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
    const auto path = outcome.output.substr(0, outcome.output.find('\n')).substr(std::string("run folder: ").size());
    EXPECT_EQ(path.substr(0, 5), "runs/") << outcome.output;
    EXPECT_EQ(names_in(folder_.path() / path), (std::set<std::string>{".lock", "checkpoints", "config.json", "log.jsonl", "losses.svg"}));
    EXPECT_EQ(names_in(folder_.path() / path / "checkpoints"), (std::set<std::string>{"step-6", "step-12"}));

    const auto config = Json::parse(read(folder_.path() / path / "config.json"));
    EXPECT_EQ(config["steps"], 12);
    EXPECT_EQ(config["model"]["dim"], 16);
    const auto plot = read(folder_.path() / path / "losses.svg");
    const auto from = plot.find("class=\"training\"");
    EXPECT_EQ(count(plot.substr(from, plot.find("/>", from) - from), ","), 12U) << plot;
    EXPECT_EQ(count(plot, "class=\"validation\""), 2U) << plot;
  }
  EXPECT_EQ(names_in(folder_.path() / "runs").size(), 2U);
}

TEST_F(TrainGptRuns, ATimelineIsDrawnOnRequest) {
  const auto outcome = run("drawn", tiny({"--run", run_folder("drawn"), "--timeline"}));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_NE(outcome.output.find("timeline: " + run_folder("drawn") + "/timeline.html\n"), std::string::npos) << outcome.output;
  EXPECT_EQ(names_in(run_folder("drawn")),
            (std::set<std::string>{".lock", "checkpoints", "config.json", "events", "log.jsonl", "losses.svg", "timeline.html"}));
  EXPECT_EQ(names_in(run_folder("drawn") + "/events"), (std::set<std::string>{"rank-0.events", "rank-1.events"}));
  const auto page = read(run_folder("drawn") + "/timeline.html");
  const std::string mark = R"(id="data">)";
  const auto from = page.find(mark) + mark.size();
  const auto data = Json::parse(page.substr(from, page.find("</script>", from) - from));
  ASSERT_EQ(data["ranks"].size(), 2U);
  const auto& steps = data["ranks"][1]["steps"];
  ASSERT_GE(steps.size(), 12U * 4) << "all twelve of them, with number, begin, end and whether it is whole";
  EXPECT_EQ(steps[0], 1);
  EXPECT_EQ(steps[4 * 11], 12);
  EXPECT_EQ(steps[4 * 11 + 3], 1);
  // A run that goes on draws the steps of its own.
  const auto resumed = run("resumed", {"--resume", run_folder("drawn"), "--steps", "14"});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.errors;
  EXPECT_NE(resumed.output.find("timeline: "), std::string::npos) << "as it was begun";
}

TEST_F(TrainGptRuns, AFolderIsNotOverwritten) {
  ASSERT_EQ(run("one", tiny({"--run", run_folder("one")})).exit_code, 0);
  const auto log_before = read(run_folder("one") + "/log.jsonl");
  const auto outcome = run("again", tiny({"--run", run_folder("one")}));
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.errors.find("holds a run: go on with --resume " + run_folder("one")), std::string::npos) << outcome.errors;
  EXPECT_EQ(read(run_folder("one") + "/log.jsonl"), log_before);

  folder_.write("file", "");
  const auto nowhere = run("nowhere", tiny({"--run", (folder_.path() / "file/run").string()}));
  EXPECT_EQ(nowhere.exit_code, 2);
  EXPECT_EQ(nowhere.errors.find("train_gpt: cannot make the folder of the run: "), 0U) << nowhere.errors;
}

TEST_F(TrainGptRuns, EqualOptionsGiveEqualBits) {
  for (const char* name : {"first", "again"}) ASSERT_EQ(run(name, tiny({"--run", run_folder(name)})).exit_code, 0);
  EXPECT_EQ(losses("again"), losses("first"));
  expect_same_checkpoint(run_folder("again") + "/checkpoints/step-12", run_folder("first") + "/checkpoints/step-12");
}

TEST_F(TrainGptRuns, OneThatWasInterruptedGoesOnAsIfNothingHadHappened) {
  const auto options = [&](const std::string& name) {
    return tiny({"--run", run_folder(name), "--steps", "120", "--eval-every", "50", "--seed", "3"});
  };
  ASSERT_EQ(run("whole", options("whole")).exit_code, 0);
  // As Ctrl-C: to the program and to its ranks.
  const auto outcome = run_and_signal("stopped", options("stopped"), run_folder("stopped") + "/log.jsonl", "kill -INT -$pid");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_NE(outcome.output.find(" --resume " + run_folder("stopped")), std::string::npos) << outcome.output;
  EXPECT_TRUE(fs::exists(run_folder("stopped") + "/losses.svg"));
  const auto stopped_at = rows("stopped").back()["step"].get<std::int64_t>();
  ASSERT_LT(stopped_at, 120);
  EXPECT_EQ(fsdp::latest(run_folder("stopped") + "/checkpoints"),
            run_folder("stopped") + "/checkpoints/step-" + std::to_string(stopped_at));

  // A run that is killed has logged steps that no checkpoint has, and half of a line.
  std::ofstream(run_folder("stopped") + "/log.jsonl", std::ios::app) << "{\"step\":" << stopped_at + 1 << ",\"loss\":0}\n{\"step\":";
  const auto resumed = run("resumed", {"--resume", run_folder("stopped")});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.errors;
  EXPECT_NE(resumed.output.find("resumed from " + run_folder("stopped") + "/checkpoints/step-" + std::to_string(stopped_at) + "\n"),
            std::string::npos)
      << resumed.output;
  std::vector<std::int64_t> steps;
  for (const auto& row : rows("stopped")) {
    if (row.contains("loss")) steps.push_back(row["step"].get<std::int64_t>());
  }
  ASSERT_EQ(steps.size(), 120U);
  for (std::size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i], static_cast<std::int64_t>(i) + 1);
  EXPECT_EQ(losses("stopped"), losses("whole"));
  expect_same_checkpoint(run_folder("stopped") + "/checkpoints/step-120", run_folder("whole") + "/checkpoints/step-120");

  // What is given beside it counts: more steps.
  const auto longer = run("longer", {"--resume", run_folder("stopped"), "--steps", "123"});
  ASSERT_EQ(longer.exit_code, 0) << longer.errors;
  EXPECT_EQ(losses("stopped").size(), 123U);
}

TEST_F(TrainGptRuns, ALogThatIsNamedAgainIsAppendedTo) {
  const auto options = [&](const std::string& name, const std::vector<std::string>& more) {
    auto arguments = tiny({"--run", run_folder(name), "--log", log("both")});
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  ASSERT_EQ(run("first", options("first", {})).exit_code, 0);
  const auto whole = losses("both");
  ASSERT_EQ(whole.size(), 12U);
  // A new run from a checkpoint in the middle.
  const auto outcome = run("second", options("second", {"--resume", run_folder("first") + "/checkpoints/step-6"}));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_EQ(losses("both"), whole);
}

TEST_F(TrainGptRuns, MinutesThatAreGivenToResumeReplaceSteps) {
  ASSERT_EQ(run("run", tiny({"--run", run_folder("run")})).exit_code, 0);
  const auto minutes = (rows("run").back()["seconds"].get<double>() + 3) / 60;
  const auto outcome = run("longer", {"--resume", run_folder("run"), "--minutes", std::to_string(minutes)});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_GT(losses("run").size(), 12U);
  EXPECT_EQ(Json::parse(read(run_folder("run") + "/config.json"))["steps"], 0);
}

TEST_F(TrainGptRuns, TheBestCheckpointStays) {
  ASSERT_EQ(run("best", tiny({"--run", run_folder("best"), "--eval-every", "1", "--keep-last", "1", "--steps", "6"})).exit_code, 0);
  // A learning rate that spoils what has been learned.
  const auto outcome = run("spoiled", {"--resume", run_folder("best"), "--lr", "5", "--steps", "9"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  std::vector<double> validations;
  for (const auto& row : rows("best")) {
    if (row.contains("validation_bits_per_byte")) validations.push_back(row["validation_bits_per_byte"].get<double>());
  }
  ASSERT_EQ(validations.size(), 9U);
  ASSERT_EQ(std::min_element(validations.begin(), validations.end()) - validations.begin() + 1, 6);
  EXPECT_EQ(names_in(run_folder("best") + "/checkpoints"), (std::set<std::string>{"step-6", "step-9"}));

  // Text comes from it, unless the newest is asked for.
  const auto text_from = [&](const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"--generate", run_folder("best"), "--temperature", "0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto outcome = run(name, arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
    return std::pair(outcome.output, outcome.errors);
  };
  const auto best = text_from("text", {});
  EXPECT_EQ(best.second, "text from " + run_folder("best") + "/checkpoints/step-6\n");
  EXPECT_EQ(text_from("other_seed", {"--seed", "9"}).first, best.first);  // Nothing is drawn.
  const auto newest = text_from("newest", {"--newest"});
  EXPECT_EQ(newest.second, "text from " + run_folder("best") + "/checkpoints/step-9\n");
  EXPECT_NE(newest.first, best.first);
}

TEST_F(TrainGptRuns, TheSameTextComesOfACheckpointTwice) {
  const auto trained = run("run", tiny({"--run", run_folder("run"), "--prompt", "the "}));
  ASSERT_EQ(trained.exit_code, 0) << trained.errors;
  EXPECT_NE(trained.output.find(" --generate " + run_folder("run") + " --prompt TEXT"), std::string::npos) << trained.output;
  const auto generate = [&](const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"--generate", run_folder("run")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto outcome = run(name, arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
    return outcome.output;
  };
  const auto text = generate("text", {});
  EXPECT_EQ(text.substr(0, 4), "the ");
  EXPECT_GT(text.size(), 5U);
  EXPECT_EQ(generate("again", {}), text);
  EXPECT_NE(trained.output.find("--- sample ---\n" + text + "-----"), std::string::npos) << trained.output;  // As the run's own.
  EXPECT_NE(generate("seed", {"--seed", "5"}), text);
  EXPECT_EQ(generate("prompt", {"--prompt", "a fox"}).substr(0, 5), "a fox");

  const auto nothing = run("nothing", {"--generate", folder_.path()});
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_NE(nothing.errors.find("is not the folder of a run: it holds no checkpoint, and no config.json of a run"), std::string::npos)
      << nothing.errors;
}

TEST_F(TrainGptRuns, SamplesAreOfTheWeightsOfTheirStepsAndTrainingGoesOn) {
  ASSERT_EQ(run("without", tiny({"--run", run_folder("without"), "--prompt", "the "})).exit_code, 0);
  const std::vector<std::string> often = {"--sample-every", "3", "--save-every", "3", "--keep-last", "0"};
  auto arguments = tiny({"--run", run_folder("with"), "--prompt", "the "});
  arguments.insert(arguments.end(), often.begin(), often.end());
  const auto trained = run("with", arguments);
  ASSERT_EQ(trained.exit_code, 0) << trained.errors;
  EXPECT_EQ(losses("with"), losses("without"));
  std::vector<int> steps;
  for (const auto& row : rows("with")) {
    if (row.contains("sample")) steps.push_back(row["step"].get<int>());
  }
  EXPECT_EQ(steps, (std::vector<int>{3, 6, 9, 12}));
  std::set<std::string> texts;
  for (const int step : steps) {
    // What --generate writes, where the checkpoint of that step is the only one.
    const auto alone = run_folder("of_" + std::to_string(step));
    const auto name = "/checkpoints/step-" + std::to_string(step);
    fs::create_directories(alone + "/checkpoints");
    fs::copy(run_folder("with") + name, alone + name, fs::copy_options::recursive);
    fs::copy(run_folder("with") + "/config.json", alone + "/config.json");
    const auto generated = run("text_" + std::to_string(step), {"--generate", alone});
    ASSERT_EQ(generated.exit_code, 0) << generated.errors;
    texts.insert(generated.output);
    const auto title = step == 12 ? std::string("--- sample ---\n") : "--- sample of step " + std::to_string(step) + " ---\n";
    EXPECT_NE(trained.output.find(title + generated.output + "-----"), std::string::npos) << trained.output;
  }
  EXPECT_GT(texts.size(), 1U);
}

TEST(Generate, GathersOncePerTextNotPerToken) {
  fsdp::testing::run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}});
    Options options{.model = {.dim = 16, .layers = 2, .heads = 2, .context = 32}, .prompt = "the "};
    torch::manual_seed(0);
    GPT model(options.model);
    auto sharded = fully_shard(*model, {.mesh = mesh, .units = each<GPTBlockImpl>()});
    const auto gathered_for = [&](std::int64_t tokens) {
      options.sample_tokens = tokens;
      sharded.reset_wire_stats();
      const auto text = Writer(options, mesh).write(model);
      EXPECT_EQ(text.empty(), rank != 0);
      if (rank == 0) {
        EXPECT_GT(text.size(), 4U);
      }
      const auto stats = sharded.wire_stats();
      return stats.all_gather_bytes + stats.scatter_bytes + stats.control_bytes;
    };
    const auto one = gathered_for(1);
    EXPECT_GT(one, 0);
    EXPECT_EQ(gathered_for(12), one);
  });
}

TEST_F(TrainGptRuns, ATerminalGetsABar) {
  const auto command = command_of(tiny({"--run", run_folder("bar")}));
  const auto out = folder_.path() / "bar.out";
  // script(1) gives it a terminal.
  const std::string script = "script -qec \"stty cols 120; " + command + "\" /dev/null >" + quoted(out) + " </dev/null";
  ASSERT_EQ(std::system(script.c_str()), 0) << read(out);
  const auto output = read(out);
  EXPECT_EQ(count(output, "\r["), 12U) << output;
  EXPECT_NE(output.find("[###############...............]  50%  step 6  loss "), std::string::npos) << output;
  for (const char* part : {" tokens/s", " gradient norm ", " left"}) EXPECT_NE(output.find(part), std::string::npos) << part;

  const auto plain = run("plain", tiny({"--run", run_folder("plain")}));
  EXPECT_EQ(plain.output.find('\r'), std::string::npos) << plain.output;
  EXPECT_NE(plain.output.find("  step 1  loss "), std::string::npos) << plain.output;
}

}  // namespace train_gpt_test
}  // namespace fsdp
