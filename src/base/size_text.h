#pragma once

#include <cstdint>
#include <string>

namespace fsdp {

/// A size in the largest binary unit that it fills: "512 B", "3.74 GiB". For tables.
std::string size_text(std::int64_t bytes);

/// The exact number, and from 1 MiB on also its size_text(): "1024 bytes", "80000000000 bytes (74.51 GiB)". For messages.
std::string bytes_text(std::int64_t bytes);

}  // namespace fsdp
