#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp {

/// Returns the bytes of a size such as "80GB", "1.5 GiB" or "512B": a number and a unit, for MemoryBudget::bytes and similar options. KB,
/// MB, GB and TB are powers of 1000, and KiB, MiB, GiB and TiB are powers of 1024. All commands and the Python package read sizes in the
/// same way. Any thread may call it. Throws Error for a text without one of these units, and for sizes that are negative or larger than
/// 2^63 - 1.
std::int64_t parse_size(std::string_view text);

}  // namespace fsdp
