#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "events/event_memory.h"

// Reads files of events. The bytes are copied, not mapped, so that a file that is cut off meanwhile is an error and not a signal.
namespace fsdp::events {

/// Reads a file to which its process may be writing: its last events, at most `most_events`. Throws std::runtime_error if it is not such a
/// file, has another version, or is cut off.
void read_file(const std::filesystem::path& path, EventMemory& into, std::size_t most_events = EventMemory::kEvents);

/// Returns how many events the file has now; 0 if it can't be read.
std::uint64_t written_to(const std::filesystem::path& path) noexcept;

}  // namespace fsdp::events
