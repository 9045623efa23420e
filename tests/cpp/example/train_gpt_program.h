#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "support/stored.h"
#include "support/temporary_folder.h"
#include "test_paths.h"

// Runs the program itself, as a user does.
namespace fsdp {
namespace train_gpt_test {

using Json = nlohmann::json;
using testing::TemporaryFolder;

struct Outcome {
  int exit_code = -1;
  std::string output;
  std::string errors;
};

inline std::string read(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

inline std::string quoted(const std::string& text) { return "'" + text + "'"; }

class TrainGpt : public ::testing::Test {
 protected:
  TrainGpt() {
    // Easy to learn, so that a few steps show: the same few words in every file.
    for (int file = 0; file < 30; ++file) {
      std::string text;
      for (int line = 0; line < 20; ++line) text += "the quick brown fox " + std::to_string((file + line) % 7) + "\n";
      folder_.write("text/part" + std::to_string(file) + ".txt", text + std::to_string(file));
    }
  }

  /// In a folder of the test, where runs/ appears.
  std::string command_of(const std::vector<std::string>& arguments, const std::string& environment = "") const {
    // What a launcher around the tests may have set is not meant for this program.
    std::string command = "cd " + quoted(folder_.path()) + " && exec env -u RANK -u WORLD_SIZE " + environment + " timeout 120 " +
                          quoted(fsdp::testing::kTrainGpt);
    for (const auto& argument : arguments) command.append(" ").append(quoted(argument));
    return command;
  }

  /// `name` keeps the files of runs apart; `environment` is set before the program, as in "RANK=0".
  Outcome run(const std::string& name, const std::vector<std::string>& arguments, const std::string& environment = "") const {
    const auto out = folder_.path() / (name + ".out");
    const auto err = folder_.path() / (name + ".err");
    std::string command = "(" + command_of(arguments, environment) + ")";
    command.append(" >").append(quoted(out)).append(" 2>").append(quoted(err));
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(out), read(err)};
  }

  /// Does `send` in the shell, where $pid is the program's parent and leads their process group, once the log has a row of step 5.
  Outcome run_and_signal(const std::string& name, const std::vector<std::string>& arguments, const std::string& log_path,
                         const std::string& send) const {
    const auto out = folder_.path() / (name + ".out");
    const auto err = folder_.path() / (name + ".err");
    const auto script = "(" + command_of(arguments) + " & pid=$!; until grep -q '\"step\":5,' " + quoted(log_path) +
                        " 2>/dev/null || ! kill -0 $pid; do sleep 0.05; done; " + send + "; wait $pid) >" + quoted(out) + " 2>" +
                        quoted(err);
    const int status = std::system(script.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(out), read(err)};
  }

  /// A model small enough to train in a moment, and more arguments.
  std::vector<std::string> tiny(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {"--data", data()};
    std::istringstream words(
        "--dim 16 --layers 2 --heads 2 --context 32 --batch 4 --lr 0.01 --warmup 2 --steps 12 --eval-every 6 --eval-sequences 8 "
        "--sample-tokens 20");
    for (std::string word; words >> word;) arguments.push_back(word);
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  std::string data() const { return folder_.path() / "text"; }
  std::string run_folder(const std::string& name) const { return folder_.path() / name; }
  std::string log(const std::string& name) const { return folder_.path() / (name + ".jsonl"); }

  std::vector<Json> rows(const std::string& name) const {
    std::vector<Json> rows;
    const std::string in_folder = run_folder(name) + "/log.jsonl";
    std::istringstream lines(read(std::filesystem::exists(in_folder) ? in_folder : log(name)));
    for (std::string line; std::getline(lines, line);) rows.push_back(Json::parse(line));
    return rows;
  }

  std::vector<double> losses(const std::string& name) const {
    std::vector<double> losses;
    for (const auto& row : rows(name)) {
      if (row.contains("loss")) losses.push_back(row["loss"].get<double>());
    }
    return losses;
  }

  TemporaryFolder folder_;
};

/// Model and optimizer, without what tells how long it took.
inline std::map<std::string, at::Tensor> trained(const std::filesystem::path& checkpoint) {
  auto tensors = fsdp::testing::stored_tensors(checkpoint);
  std::erase_if(tensors, [](const auto& entry) { return entry.first.starts_with("fsdp.rng."); });
  return tensors;
}

}  // namespace train_gpt_test
}  // namespace fsdp
