#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "events/event.h"
#include "events/event_memory.h"

// The files that FSDP_EVENTS makes ranks keep, and the processes that write them.
namespace fsdp::report {

/// How the process of a rank is now. kElsewhere: it can't be seen from here, as it is on another host, or in another container.
enum class ProcessState : std::uint8_t { kRunning, kStopped, kDebugged, kDead, kElsewhere };

/// What one rank has left.
struct RankEvents {
  std::filesystem::path file;
  events::EventWriter writer;
  std::vector<events::Event> events;  ///< `unit` and `operation` are indices into `names`.
  std::vector<std::string> names;     ///< The first is empty.
  std::vector<std::string> sources;   ///< By Event::source: what it is, for example a row's name, and its number among those of this name.
  std::uint64_t written = 0;          ///< How many events it had written when the file was read.
  std::int64_t alive = 0;             ///< When it noted last that it lives, as it does in waits; 0: never.
  ProcessState process = ProcessState::kElsewhere;
  bool moves = false;      ///< It has written events while read_run() looked.
  double processors = -1;  ///< How many processors its process used meanwhile; -1: not known.

  std::string_view text_of(std::uint32_t name) const { return name < names.size() ? names[name] : std::string_view(); }
};

/// Reads the last events of one rank's file, and looks at its process. Throws Error if it is no such file, or one of another version.
RankEvents read_events(const std::filesystem::path& file, std::size_t most_events = events::EventMemory::kEvents);

/// What the ranks of one run have left.
struct Run {
  std::vector<RankEvents> ranks;      ///< By rank.
  std::vector<std::string> left_out;  ///< What is said of files that can't be read, or that an earlier run has left.
};

/// Reads the folder, which may have files of earlier runs, too. Looks twice at processes that run, for which it takes a third of a second.
/// Throws Error if the folder, or all of its files, can't be read.
Run read_run(const std::filesystem::path& folder, std::size_t most_events = events::EventMemory::kEvents);

/// Leaves out what another run than the newest has left. Returns those ranks.
std::vector<std::int64_t> drop_earlier_runs(std::vector<RankEvents>& ranks);

/// Whether its process is there.
bool lives(const RankEvents& rank);

/// The lines of its program at which a process is, from the outermost to the innermost, if it can tell them: its Python package has written
/// them to a file in memory, or the engine has for a C++ program (see lines_of_native_stack()), and it runs on this host. Empty otherwise.
/// Waits up to a second for the answer.
std::vector<std::string> lines_of_program(const events::EventWriter& writer);

}  // namespace fsdp::report
