#pragma once

#include <cstdint>

namespace fsdp {

/// Copies bytes that do not overlap, by parallel_for where there are many. From 1 MiB on, the target is written past the processor's caches
/// (on x86-64): what was there need not be read from memory first, and what other code has in the caches stays.
void parallel_copy(void* target, const void* source, std::int64_t bytes);

}  // namespace fsdp
