#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "report/timeline.h"

// Makes the files of a timeline from a folder of events.
namespace fsdp::report {

/// Reads the folder. `left_out` is Run::left_out. Throws Error as timeline_of().
Timeline read_timeline(const std::filesystem::path& folder, const std::optional<StepRange>& steps, std::vector<std::string>& left_out);

/// "12-14", or one number. Throws Error, which names the option --steps, for anything else.
StepRange parse_steps(const std::string& text);

/// "rank 0 waited 299.9 ms for the all-gather of 'blocks.2': rank 1 was in forward of 'blocks.0'", or empty if no rank waited. Waits that
/// do not end come first, then those of complete steps, if there are any.
std::string longest_wait(const Timeline& timeline);

/// Returns the title of a page of the folder: its path, as given.
std::string title_of(const std::filesystem::path& folder);

}  // namespace fsdp::report
