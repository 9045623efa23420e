#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// The options of generate_llama: their names and help on the command line.

namespace llama {

struct GenerateOptions {
  std::string model;
  std::string prompt;
  std::vector<std::int32_t> prompt_tokens;
  std::string prompts;  ///< "text" or "tokens": what comes on the standard input. Empty: one prompt, from the command line.
  std::int64_t tokens = 100;
  double temperature = 0.8;
  std::uint64_t seed = 1;
  std::string device = "cpu";
};

/// Reads the command line. Returns the exit code if the program is to end here: it has printed help, or one line about an error.
std::optional<int> parse(int argc, char** argv, GenerateOptions& options);

/// Reads "1,2,3". Throws std::runtime_error if it says something else.
std::vector<std::int32_t> tokens_of(const std::string& line);

}  // namespace llama
