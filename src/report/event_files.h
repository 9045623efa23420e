#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "events/event.h"
#include "events/event_memory.h"

// The files that ranks keep with FSDP_EVENTS, and the processes that write them.
namespace fsdp::report {

/// The state of a rank's process. kElsewhere: it is not visible from here, because it is on another host, or in another container.
enum class ProcessState : std::uint8_t { kRunning, kStopped, kDebugged, kDead, kElsewhere };

/// The record of one rank.
struct RankEvents {
  std::filesystem::path file;
  events::EventWriter writer;
  std::vector<events::Event> events;  ///< `unit` and `operation` are indices into `names`.
  std::vector<std::string> names;     ///< The first is empty.
  std::vector<std::string> sources;   ///< By Event::source: its name, for example a row's, and its number among those of this name.
  std::uint64_t written = 0;          ///< How many events it had written when the file was read.
  std::int64_t alive = 0;             ///< When it last recorded that it is alive, as it does in waits; 0: never.
  ProcessState process = ProcessState::kElsewhere;
  bool moves = false;      ///< It has written events during read_run().
  double processors = -1;  ///< How many processors its process used meanwhile; -1: not known.

  std::string_view text_of(std::uint32_t name) const { return name < names.size() ? names[name] : std::string_view(); }
};

/// Reads the last events of one rank's file, and looks at its process. Throws Error if it is not such a file, or has another version.
RankEvents read_events(const std::filesystem::path& file, std::size_t most_events = events::EventMemory::kEvents);

/// The records of the ranks of one run.
struct Run {
  std::vector<RankEvents> ranks;      ///< By rank.
  std::vector<std::string> left_out;  ///< Messages about files that can't be read, or that belong to an earlier run.
};

/// Reads the folder, which may have files of earlier runs, too. It examines running processes twice, which takes a third of a second.
/// Throws Error if the folder, or all of its files, can't be read.
Run read_run(const std::filesystem::path& folder, std::size_t most_events = events::EventMemory::kEvents);

/// Removes the records of all runs except the newest. Returns those ranks.
std::vector<std::int64_t> drop_earlier_runs(std::vector<RankEvents>& ranks);

/// Whether its process is there.
bool lives(const RankEvents& rank);

/// Returns the lines of its program at which a process is, from the outermost to the innermost. The process must run on this host; its
/// Python package, or for a C++ program the engine (see lines_of_native_stack()), writes them to a file in memory. Empty otherwise. Waits
/// up to a second for the answer.
std::vector<std::string> lines_of_program(const events::EventWriter& writer);

}  // namespace fsdp::report
