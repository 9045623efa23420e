#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "events/event.h"

// The events of this process, which are always recorded.
namespace fsdp::events {

/// Writes the event to the memory of this process. Any thread, and handlers of signals; takes no lock and no memory.
void record(const Event& event) noexcept;
/// Records that this process is alive, for readers of its file after its death. Collectives call it repeatedly while they wait. Any thread.
void note_alive() noexcept;
/// Records how this process ends, with the text of an exception if there is one. The first call of a process counts.
void record_end(EndKind end, std::string_view text = {}) noexcept;
/// Returns the events of this process that are kept, the oldest first. A forked process begins with none.
std::vector<Event> recorded();

/// From now on, waits of a device's streams are measured and recorded (kHeldStream). They cost the host more than other events, so they are
/// measured only if they are used. Any thread.
void measure_streams() noexcept;
/// True after measure_streams().
bool measures_streams() noexcept;

/// Returns a number for an engine or a row, which is unique in this process. `what` is its name for readers of the events: name_of_row()
/// for a row, otherwise one word.
std::uint32_t new_source(const std::string& what);
/// These sources; see EventMemory::sources().
std::map<std::uint32_t, std::string> described_sources();

/// Returns the number of a name in this process. A name's first use takes a lock; later ones do not. 0 is the number of "", and of names
/// for which there is no room left (after thousands).
std::uint32_t name_of(std::string_view text);
/// Returns the text of such a number, which stays valid as long as the process lives.
std::string_view text_of(std::uint32_t name) noexcept;

/// From now on, the events of this process, with those that are kept now, are in FOLDER/rank-RANK.events. Other processes may read the file
/// at any time, also after this process has died in any way. All its blocks are allocated before it is used, so that a full disk makes no
/// later write fail. A file of that name is replaced; processes that have it open keep the old one. Throws std::runtime_error if that can't
/// be done; the events then stay where they are. One thread at a time.
void keep_in_file(const std::filesystem::path& folder, std::int64_t rank, std::int64_t world_size);
/// Does so, once in this process, if the environment variable FSDP_EVENTS names a folder, and records how the process ends from then on. If
/// that can't be done, it prints the reason on stderr. Any thread.
void keep_in_file_if_asked(std::int64_t rank, std::int64_t world_size) noexcept;
/// The folder that FSDP_EVENTS names; empty if it names none.
std::filesystem::path asked_folder();
/// The name of a rank's file in it.
std::filesystem::path file_of(const std::filesystem::path& folder, std::int64_t rank);

}  // namespace fsdp::events
