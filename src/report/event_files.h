#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "events/event.h"
#include "events/event_memory.h"

// The files that FSDP_EVENTS makes ranks keep, and the processes that write them.
namespace fsdp::report {

/// How the process of a rank is now. kElsewhere: it can't be seen from here, as it is on another host, or in another container.
enum class ProcessState : std::uint8_t { kRunning, kStopped, kDebugged, kDead, kElsewhere };

/// What one rank has left.
struct RankEvents {
  events::EventWriter writer;
  std::vector<events::Event> events;  ///< In time; `unit` and `operation` are indices into `names`.
  std::vector<std::string> names;     ///< The first is empty.
  std::vector<std::string> sources;   ///< By Event::source: what it is, for example a row's name, and its number among those of this name.
  std::uint64_t written = 0;          ///< How many events it had written when the file was read.
  ProcessState process = ProcessState::kElsewhere;
};

/// Reads the last events of one rank's file, and looks at its process. Throws Error if it is no such file, or one of another version.
RankEvents read_events(const std::filesystem::path& file, std::size_t most_events = events::EventMemory::kEvents);

/// The files of events in a folder, in no order. Throws Error if it can't be read.
std::vector<std::filesystem::path> event_files_in(const std::filesystem::path& folder);

/// Reads all of them, by rank; what can't be read is left out, and listed in `unreadable`.
std::vector<RankEvents> read_all_events(const std::filesystem::path& folder, std::vector<std::string>& unreadable);

/// Seconds of processors that a process has used so far; -1 if it can't be seen.
double processor_seconds(const events::EventWriter& writer);

/// The lines of its program at which a process is, from the outermost to the innermost, if it can tell them: its Python package has said so
/// in a file of the folder, or the engine has for a C++ program (see lines_of_native_stack()), and it runs on this host. Empty otherwise.
/// Waits up to a second for the answer.
std::vector<std::string> lines_of_program(const std::filesystem::path& folder, const events::EventWriter& writer);

}  // namespace fsdp::report
