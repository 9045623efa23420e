// Runs the command itself, as a user does.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/temporary_folder.h"
#include "test_paths.h"

namespace fsdp {
namespace fsdp_plan_test {

struct Outcome {
  int exit_code = -1;
  std::string output;
  std::string errors;
};

std::string read(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

/// The sizes of a Llama with 1024 elements of keys.
struct Llama {
  std::int64_t width = 0;
  std::int64_t hidden = 0;
  std::int64_t words = 0;
  std::int64_t layers = 0;
  bool tied = false;
};

constexpr std::int64_t kTokens = 8192;

/// What tools/describe_config.py prints of it.
nlohmann::json description_of(const Llama& llama) {
  const auto [width, hidden, words, layers, tied] = llama;
  nlohmann::json found = {{"parameters", nlohmann::json::array()}, {"blocks", nlohmann::json::array()}};
  found["embedding_and_head"] = nlohmann::json::array();
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape, const std::string& same_as = "") {
    found["parameters"].push_back({{"name", name}, {"shape", shape}, {"trained", true}, {"same_as", same_as.empty() ? name : same_as}});
  };
  const double of_block = 2.0 * kTokens * (2 * width * width + 2 * width * 1024 + 3 * width * hidden + width * kTokens);
  const double of_head = 2.0 * kTokens * width * words;
  add("model.embed_tokens.weight", {words, width});
  for (std::int64_t k = 0; k < layers; ++k) {
    const auto block = "model.layers." + std::to_string(k);
    for (const char* name : {"q_proj", "o_proj"}) add(block + ".self_attn." + name + ".weight", {width, width});
    for (const char* name : {"k_proj", "v_proj"}) add(block + ".self_attn." + name + ".weight", {1024, width});
    for (const char* name : {"gate_proj", "up_proj"}) add(block + ".mlp." + name + ".weight", {hidden, width});
    add(block + ".mlp.down_proj.weight", {width, hidden});
    for (const char* name : {"input_layernorm", "post_attention_layernorm"}) add(block + "." + name + ".weight", {width});
    found["blocks"].push_back(block);
    found["operations"][block] = of_block;
  }
  add("model.norm.weight", {width});
  add("lm_head.weight", {words, width}, tied ? "model.embed_tokens.weight" : "");
  if (!tied) found["embedding_and_head"] = {"model.embed_tokens", "lm_head"};
  if (!tied) found["operations"].update({{"model.embed_tokens", 0.0}, {"lm_head", of_head}});
  found["operations"][""] = static_cast<double>(layers) * of_block + of_head;
  return found;
}

/// A stand-in for Python with transformers prints the descriptions: that takes seconds less, and tests/python has the real one.
class FsdpPlan : public ::testing::Test {
 protected:
  FsdpPlan() {
    describe("config.json", {.width = 16384, .hidden = 53248, .words = 128256, .layers = 126});
    describe("small.json", kSmall);
    std::ofstream(folder_.path() / "python") << "#!/bin/sh\ncat \"$3.description\"\n";
    std::filesystem::permissions(folder_.path() / "python", std::filesystem::perms::owner_all);
  }

  void describe(const std::string& name, const Llama& llama) const {
    std::ofstream(folder_.path() / name) << "{}";
    std::ofstream(folder_.path() / (name + ".description")) << description_of(llama);
  }

  Outcome run(const std::string& arguments, const std::string& python = "./python") const {
    const std::string line = "cd '" + folder_.path().string() + "' && FSDP_PYTHON=" + python + " timeout 60 '" + testing::kFsdp +
                             "' plan " + arguments + " >out 2>err";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(folder_.path() / "out"), read(folder_.path() / "err")};
  }

  static constexpr Llama kSmall = {.width = 4096, .hidden = 14336, .words = 32000, .layers = 6};
  testing::TemporaryFolder folder_;
};

/// The number after a text.
double number_after(const std::string& output, const std::string& text) {
  const auto place = output.find(text);
  return place == std::string::npos ? -1 : std::stod(output.substr(place + text.size()));
}

TEST_F(FsdpPlan, RecommendsWhatMakesItFit) {
  const auto kept = run("small.json --ranks 64 --memory 2400MiB --keep");
  EXPECT_EQ(kept.exit_code, 1) << kept.errors;
  const auto place = kept.output.find("GiB without --keep (units are gathered once more, for backward), with --split-root (");
  EXPECT_NE(place, std::string::npos) << kept.output;
  EXPECT_EQ(run("small.json --ranks 64 --memory 2400MiB --split-root").exit_code, 0);  // It is right,
  EXPECT_EQ(run("small.json --ranks 64 --memory 2400MiB").exit_code, 1);               // and both are needed.
  EXPECT_EQ(run("small.json --ranks 64 --memory 2400MiB --split-root --keep").exit_code, 1);
  const auto never = run("small.json --ranks 1 --memory 1GiB");
  EXPECT_EQ(never.output.find("It fits in"), std::string::npos) << never.output;
  // All is tried, one after the other, and nothing that can't be.
  for (const char* options : {"", " --placements optim", " --hfsdp"}) {
    const auto replicas = run("small.json --ranks 64 --replicas 4 --memory 2800MiB" + std::string(options));
    EXPECT_EQ(replicas.exit_code, 1) << options << replicas.errors;
    EXPECT_NE(replicas.output.find("It fits in"), std::string::npos) << replicas.output;
    EXPECT_EQ(replicas.output.find("with --replicas 1"), std::string::npos) << replicas.output;  // It is not needed,
  }
  const auto less = run("small.json --ranks 64 --replicas 4 --memory 1900MiB --placements optim");
  EXPECT_NE(less.output.find("with --replicas 1"), std::string::npos) << less.output;  // and here it is, in the place of --hfsdp.
  EXPECT_EQ(less.output.find("with --hfsdp"), std::string::npos) << less.output;
  const auto alone = run("small.json --ranks 64 --hfsdp");
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_NE(alone.errors.find("give --replicas"), std::string::npos) << alone.errors;
}

TEST_F(FsdpPlan, FindsTheSmallestWorldWithinAHostAndOfHosts) {
  const auto within = run("small.json --ranks 4 --memory 80GB");
  EXPECT_NE(within.output.find("The smallest world that fits has 1 rank.\n"), std::string::npos) << within.output;
  const auto hosts = run("small.json --ranks 64 --memory 4GiB");
  EXPECT_NE(hosts.output.find(" ranks, 8 on each host.\n"), std::string::npos) << hosts.output;
}

TEST_F(FsdpPlan, MakesUnitsOfTheEmbeddingAndTheHead) {
  const std::string time = " --flops 400e12 --sequence 8192 --rate 1000TB --latency 0";
  const auto whole = nlohmann::json::parse(run("small.json --ranks 64 --json" + time).output);
  const auto split = nlohmann::json::parse(run("small.json --ranks 64 --json --split-root" + time).output);
  EXPECT_EQ(whole["units"].size(), 7U);
  ASSERT_EQ(split["units"].size(), 9U) << split;
  EXPECT_EQ(split["units"][1]["name"], "model.embed_tokens");
  EXPECT_EQ(split["units"][8]["name"], "lm_head");
  EXPECT_EQ(split["units"][0]["elements"], 4096);  // the last norm
  // Neither the head's weight nor that of the embedding, each 250 MiB in bf16, is there in backward of a block.
  const auto difference =
      whole["peak"]["gathered_parameters"].get<std::int64_t>() - split["peak"]["gathered_parameters"].get<std::int64_t>();
  EXPECT_GE(difference, 2 * std::int64_t{250} << 20) << whole["peak"] << split["peak"];
  EXPECT_NEAR(split["time"]["compute_ms"].get<double>(), whole["time"]["compute_ms"].get<double>(), 1e-3);
  auto tied = kSmall;
  tied.tied = true;
  describe("tied.json", tied);
  EXPECT_EQ(run("tied.json --ranks 64 --split-root").output, run("tied.json --ranks 64").output);
}

TEST_F(FsdpPlan, RecommendsWhatSendsLess) {
  const auto fits = run("small.json --ranks 64 --memory 100GiB");
  EXPECT_NE(fits.output.find("It also fits with --keep, in"), std::string::npos) << fits.output;
  EXPECT_NE(fits.output.find("GiB less"), std::string::npos) << fits.output;
  EXPECT_EQ(fits.output.find("--offload none"), std::string::npos) << fits.output;  // It is so.
}

TEST_F(FsdpPlan, ComparesTwoPlans) {
  for (const auto& [name, placements] : {std::pair{"a", "optim_grads_params"}, {"b", "optim_grads"}}) {
    const auto planned =
        run("small.json --ranks 64 --json --flops 400e12 --sequence 8192 --rate 50GB --placements " + std::string(placements));
    EXPECT_EQ(planned.exit_code, 0) << planned.errors;
    std::ofstream(folder_.path() / (std::string(name) + ".json")) << planned.output;
  }
  const auto compared = run("--compare a.json b.json");
  EXPECT_EQ(compared.exit_code, 0) << compared.errors;
  for (const char* row : {"gathered parameters", "optimizer state", "all gather bytes", "step ms"}) {
    EXPECT_NE(compared.output.find(row), std::string::npos) << row << "\n" << compared.output;
  }
  const auto line = compared.output.substr(compared.output.find("gathered parameters", compared.output.find("The most in a step")) + 19);
  const auto json = nlohmann::json::parse(read(folder_.path() / "b.json"));
  std::istringstream numbers(line);
  double a = 0, b = 0, ratio = 0;
  numbers >> a >> b >> ratio;
  EXPECT_EQ(b, json["memory"]["gathered_parameters"]["peak"].get<double>());
  EXPECT_NEAR(ratio, b / a, 0.001);
  EXPECT_GT(ratio, 1.5);  // The second keeps all units gathered.
  EXPECT_EQ(run("--compare a.json config.json").exit_code, 2);
  EXPECT_EQ(run("--compare a.json").exit_code, 2);
  EXPECT_EQ(run("--ranks 8").exit_code, 2);
  EXPECT_EQ(run("config.json").exit_code, 2);
}

TEST_F(FsdpPlan, DrawsTheMemoryOfAStep) {
  EXPECT_EQ(run("small.json --ranks 64 --svg memory.svg").exit_code, 0);
  const auto svg = read(folder_.path() / "memory.svg");
  for (const char* part : {"<svg ", "</svg>", "forward of 'model.layers.5'", "the update", "optimizer state"}) {
    EXPECT_NE(svg.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(run("small.json --ranks 64 --svg missing/memory.svg").exit_code, 2);
}

TEST_F(FsdpPlan, TellsTheTimeOfAStep) {
  const std::string step = "small.json --ranks 256 --flops 400e12 --sequence 8192";
  const auto fast = run(step + " --rate 1000TB --latency 0");
  EXPECT_EQ(fast.exit_code, 0) << fast.errors;
  // Without waits: two operations for each weight but the embedding's and norms', and attention; three times for forward and backward.
  const double width = 4096;
  const double blocks = 6 * (2 * width * width + 2 * width * 1024 + 3 * width * 14'336 + width * 8192);
  const double head = width * 32'000;
  EXPECT_NEAR(number_after(fast.output, "computation "), 1e3 * 8192 * 6 * (blocks + head) / 400e12, 0.1) << fast.output;
  EXPECT_NEAR(number_after(fast.output, "waits "), 0, 0.1) << fast.output;
  const auto json = nlohmann::json::parse(run(step + " --rate 1000TB --latency 0 --json").output);
  EXPECT_NEAR(json["time"]["compute_ms"].get<double>(), number_after(fast.output, "computation "), 0.1);
  EXPECT_LT(json["time"]["from_ms"].get<double>(), json["time"]["step_ms"].get<double>());
  EXPECT_GT(json["time"]["to_ms"].get<double>(), json["time"]["step_ms"].get<double>());
  const auto slow = run(step + " --rate 1GB");
  EXPECT_GT(number_after(slow.output, "waits "), 1e3) << slow.output;
  const auto again = run(step + " --rate 1000TB --latency 0 --recompute");
  EXPECT_NEAR(number_after(again.output, "computation "), 1e3 * 8192 * (8 * blocks + 6 * head) / 400e12, 0.1) << again.output;
  EXPECT_EQ(run("small.json --ranks 8 --flops 400e12").exit_code, 2);  // without the length of sequences
}

TEST_F(FsdpPlan, SaysWhetherAModelFits) {
  const auto fits = run("config.json --ranks 16384 --memory 80GB");
  EXPECT_EQ(fits.exit_code, 0) << fits.errors;
  for (const char* part : {"16384 ranks, 405.85 B elements in 127 units", "main parameters", "It fits into 80000000000 bytes (74.51 GiB)",
                           "model.layers.0 to model.layers.125 (126, each)", "The smallest world that fits has "}) {
    EXPECT_NE(fits.output.find(part), std::string::npos) << part << "\n" << fits.output;
  }
  const auto not_fitting = run(". --ranks 8 --memory 80GB");
  EXPECT_EQ(not_fitting.exit_code, 1) << not_fitting.errors;
  EXPECT_NE(not_fitting.output.find("It does not fit"), std::string::npos) << not_fitting.output;
}

TEST_F(FsdpPlan, PrintsJson) {
  const auto outcome = run("config.json --ranks 1024 --replicas 8 --hfsdp --json --offload state --activations 1MiB");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
  const auto json = nlohmann::json::parse(outcome.output);
  EXPECT_EQ(json["ranks"], 1024);
  EXPECT_EQ(json["units"].size(), 127U);
  EXPECT_EQ(json["links"].size(), 2U);
  EXPECT_EQ(json["units"][1]["activations"], 1 << 20);
  EXPECT_GT(json["memory"]["host"]["peak"].get<std::int64_t>(), 0);
}

TEST_F(FsdpPlan, ReadsSizesAndNumbersInOneWay) {
  const auto refused = [&](const std::string& option) {
    const auto outcome = run("small.json --ranks 8 " + option);
    EXPECT_EQ(outcome.exit_code, 2) << option;
    return outcome.errors;
  };
  for (const char* option : {"--memory", "--activations", "--keep-gathered", "--rate", "--replicate-rate"}) {
    EXPECT_EQ(refused(option + std::string(" 24")).find("fsdp: " + std::string(option) + ": '24' is no size: write a number and a unit"),
              0U);
  }
  EXPECT_EQ(refused("--ranks eight"), "fsdp: --ranks: 'eight' is no whole number of at least 1\n");
  EXPECT_EQ(refused("--ranks-per-host -1"), "fsdp: --ranks-per-host: '-1' is no whole number of at least 0\n");
  EXPECT_EQ(refused("--flops nan --sequence 8 --rate 1GB"), "fsdp: --flops: 'nan' is no number above 0\n");
  const auto need = nlohmann::json::parse(run("small.json --ranks 8 --json").output)["peak"]["device"].get<std::int64_t>();
  const auto gibibytes = std::to_string(need / (std::int64_t{1} << 30) + 1);
  EXPECT_EQ(run("small.json --ranks 8 --memory " + gibibytes + "GiB").exit_code, 0);
  EXPECT_EQ(run("small.json --ranks 8 --memory " + std::to_string(need) + "B").exit_code, 0);
  EXPECT_EQ(run("small.json --ranks 8 --memory " + std::to_string(need - 1) + "B").exit_code, 1);
}

TEST_F(FsdpPlan, WithoutACommandPrintsTheHelp) {
  for (const auto& command : {testing::kFsdp, testing::kFsdpCkpt}) {
    const std::string line = "cd '" + folder_.path().string() + "' && '" + command + "' 2>err";
    EXPECT_EQ(WEXITSTATUS(std::system(line.c_str())), 2);
    EXPECT_NE(read(folder_.path() / "err").find("Subcommands:\n"), std::string::npos) << read(folder_.path() / "err");
  }
}

TEST_F(FsdpPlan, NeedsAPythonWithTransformers) {
  EXPECT_EQ(run("small.json --ranks 8", "/nowhere").exit_code, 2);
  EXPECT_NE(run("small.json --ranks 8", "/nowhere").errors.find("'/nowhere' does not run. Install it there (pip install transformers)"),
            std::string::npos);
  std::ofstream(folder_.path() / "small.json.description") << R"({"has_transformers": false, "error": "No module named 'transformers'"})";
  EXPECT_NE(run("small.json --ranks 8").errors.find("can't import it (No module named 'transformers')"), std::string::npos);
  std::ofstream(folder_.path() / "small.json.description") << R"({"has_transformers": true, "error": "ValueError: no heads"})";
  EXPECT_EQ(run("small.json --ranks 8").errors.find("fsdp: small.json: transformers refuses it: ValueError: no heads\n"), 0U);
}

TEST_F(FsdpPlan, RefusesWhatItCanNotRead) {
  EXPECT_EQ(run("nowhere.json --ranks 8").exit_code, 2);
  EXPECT_EQ(run("config.json").exit_code, 2);
  EXPECT_EQ(run("config.json --ranks 8 --placements all").exit_code, 2);
  const auto replicas = run("config.json --ranks 9 --replicas 2");
  EXPECT_EQ(replicas.exit_code, 2);
  EXPECT_NE(replicas.errors.find("9 ranks do not divide by 2 replicas"), std::string::npos) << replicas.errors;
}

}  // namespace fsdp_plan_test
}  // namespace fsdp
