#pragma once

#include <CLI/CLI.hpp>
#include <functional>

// The subcommands of `fsdp`, each in a file of its own.
namespace fsdp::tools {

/// Exit codes, beside that of success.
inline constexpr int kFound = 1;       ///< It has found what it looks for: ranks wait, or have failed; a model does not fit.
inline constexpr int kUsageError = 2;  ///< Wrong option, or nothing to read.

/// Adds a subcommand's options to it. Returns what runs it after they have been parsed; this returns the exit code, or throws.
std::function<int()> add_plan(CLI::App& command);
std::function<int()> add_why(CLI::App& command);
std::function<int()> add_timeline(CLI::App& command);

}  // namespace fsdp::tools
