// Runs the command itself, as a user does.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

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

class FsdpPlan : public ::testing::Test {
 protected:
  FsdpPlan() {
    std::ofstream(folder_.path() / "config.json")
        << R"({"model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
               "num_attention_heads": 128, "num_key_value_heads": 8})";
  }

  Outcome run(const std::string& arguments) const {
    const std::string line =
        "cd '" + folder_.path().string() + "' && timeout 60 '" + testing::kFsdp + "' plan " + arguments + " >out 2>err";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(folder_.path() / "out"), read(folder_.path() / "err")};
  }

  testing::TemporaryFolder folder_;
};

TEST_F(FsdpPlan, SaysWhetherAModelFits) {
  const auto fits = run("config.json --ranks 16384 --memory 80GB");
  EXPECT_EQ(fits.exit_code, 0) << fits.errors;
  for (const char* part : {"16384 ranks, 405.85 B elements in 127 units", "main parameters", "It fits into 85899345920 bytes",
                           "model.layers.0 to model.layers.125 (126, each)", "The smallest world that fits has "}) {
    EXPECT_NE(fits.output.find(part), std::string::npos) << part << "\n" << fits.output;
  }
  const auto not_fitting = run(". --ranks 8 --memory 80GB");
  EXPECT_EQ(not_fitting.exit_code, 1) << not_fitting.errors;
  EXPECT_NE(not_fitting.output.find("It does not fit"), std::string::npos) << not_fitting.output;
}

TEST_F(FsdpPlan, PrintsJson) {
  const auto outcome = run("config.json --ranks 1024 --replicas 8 --hfsdp --json --offload state --activations 1MB");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
  const auto json = nlohmann::json::parse(outcome.output);
  EXPECT_EQ(json["ranks"], 1024);
  EXPECT_EQ(json["units"].size(), 127U);
  EXPECT_EQ(json["links"].size(), 2U);
  EXPECT_EQ(json["units"][1]["activations"], 1 << 20);
  EXPECT_GT(json["memory"]["host"]["peak"].get<std::int64_t>(), 0);
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
