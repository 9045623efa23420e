#pragma once

#include <cstdint>

namespace fsdp {

/// Copies bytes that do not overlap, by parallel_for where there are many. From 1 MiB on, the target is written past the processor's caches
/// (on x86-64): the old contents are not read from memory first, and data of other code stay in the caches.
void parallel_copy(void* target, const void* source, std::int64_t bytes);

}  // namespace fsdp
