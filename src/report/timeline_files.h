#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "report/timeline.h"

// From a folder of events to the files of a timeline.
namespace fsdp::report {

/// Reads the folder. `left_out` is Run::left_out. Throws Error as timeline_of().
Timeline read_timeline(const std::filesystem::path& folder, const std::optional<StepRange>& steps, std::vector<std::string>& left_out);

/// "12-14", or one number. Throws Error, which names the option --steps, for anything else.
StepRange parse_steps(const std::string& text);

/// "rank 0 waited 299.9 ms for the all-gather of 'blocks.2': rank 1 was in forward of 'blocks.0'", or empty if no rank waited: a wait in
/// vain, or else one of a step that is whole, if there are any.
std::string longest_wait(const Timeline& timeline);

/// What a page of the folder is called: its path, as it is given.
std::string title_of(const std::filesystem::path& folder);

}  // namespace fsdp::report
