#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "events/event.h"

// The events of this process, always on.
namespace fsdp::events {

/// Writes the event to the memory of this process. Any thread, and handlers of signals; takes no lock and no memory.
void record(const Event& event) noexcept;
/// Notes that this process lives, for whoever reads its file after its death. Collectives call it again and again while they wait. Any
/// thread.
void note_alive() noexcept;
/// Notes how this process ends, with the text of the exception if it is one. The first call of a process counts.
void record_end(EndKind end, std::string_view text = {}) noexcept;
/// The events of this process that are kept, the oldest first. A forked process begins with none.
std::vector<Event> recorded();

/// From now on, waits of a device's streams are measured and told (kHeldStream): somebody looks at them, and they cost the host more than
/// other events. Any thread.
void measure_streams() noexcept;
/// Whether that is so.
bool measures_streams() noexcept;

/// A number for an engine or a row, which no other one of this process has. `what` tells who reads the events elsewhere what it is: of a
/// row, name_of_row(), otherwise one word.
std::uint32_t new_source(const std::string& what);
/// These sources; see EventMemory::sources().
std::map<std::uint32_t, std::string> described_sources();

/// The number of a name in this process. A name's first use takes a lock; later ones do not. 0 is the name of nothing, "", and also of
/// names for which there is no room any more (thousands).
std::uint32_t name_of(std::string_view text);
/// The text of such a number, for as long as the process lives.
std::string_view text_of(std::uint32_t name) noexcept;

/// From now on, the events of this process lie in FOLDER/rank-RANK.events, with those that are kept now. Others may read the file at any
/// time, also when this process has died, however it did. All its blocks are there before it is used, so that a full disk makes no later
/// write fail. A file of that name is replaced: who has it open keeps the old one. Throws std::runtime_error if that can't be done; the
/// events then stay where they are. One thread at a time.
void keep_in_file(const std::filesystem::path& folder, std::int64_t rank, std::int64_t world_size);
/// Does so, once in this process, if the environment variable FSDP_EVENTS names a folder, and notes how the process ends from then on. If
/// that can't be done, a line on stderr says why. Any thread.
void keep_in_file_if_asked(std::int64_t rank, std::int64_t world_size) noexcept;
/// The folder that FSDP_EVENTS names; empty if it names none.
std::filesystem::path asked_folder();
/// The name of a rank's file in it.
std::filesystem::path file_of(const std::filesystem::path& folder, std::int64_t rank);

}  // namespace fsdp::events
