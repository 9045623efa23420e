#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "events/event_memory.h"

// Files of events, as others read them. The bytes are copied, and not mapped: a file that is cut off meanwhile is an error then, and no
// signal.
namespace fsdp::events {

/// Reads a file to which its process may be writing: its last events, at most `most_events`. Throws std::runtime_error if it is no such
/// file, is of another version, or is cut off.
void read_file(const std::filesystem::path& path, EventMemory& into, std::size_t most_events = EventMemory::kEvents);

/// How many events the file has by now; 0 if it can't be read.
std::uint64_t written_to(const std::filesystem::path& path) noexcept;

}  // namespace fsdp::events
