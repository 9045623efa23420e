#pragma once

#include <string>
#include <vector>

namespace fsdp {

/// Runs a program, which is found on PATH, with arguments and without a shell. Returns what it prints on stdout when it has ended; stderr
/// is dropped. Empty if there is no such program.
std::string output_of(const std::vector<std::string>& command);

}  // namespace fsdp
