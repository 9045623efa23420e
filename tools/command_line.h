#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>

// What the commands have in common.
namespace fsdp::tools {

/// Exit codes, beside that of success.
inline constexpr int kFound = 1;       ///< It has found what it looks for: ranks wait, faults, differences; a model does not fit.
inline constexpr int kUsageError = 2;  ///< Wrong option, or nothing to read.

/// Adds an option for a size in bytes, which parse_size() reads.
CLI::Option* add_size(CLI::App& command, const std::string& name, std::int64_t& bytes, const std::string& what);
/// Checks for whole numbers of at least `least`, and for numbers above 0.
CLI::Validator whole_number(std::int64_t least);
CLI::Validator positive_number();

/// Parses the arguments and calls `chosen`. Returns the exit code. Without arguments, prints the help on stderr. `app` has subcommands.
int run_command(CLI::App& app, int argc, char** argv, const std::function<int()>& chosen);

}  // namespace fsdp::tools
