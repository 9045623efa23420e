#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "command_line.h"

// The subcommands of `fsdp`, each in a file of its own.
namespace fsdp::tools {

/// Adds a subcommand's options to it. Returns what runs it after they have been parsed; this returns the exit code, or throws.
std::function<int()> add_plan(CLI::App& command);
std::function<int()> add_why(CLI::App& command);
std::function<int()> add_timeline(CLI::App& command);

}  // namespace fsdp::tools
