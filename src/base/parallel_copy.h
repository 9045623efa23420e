#pragma once

#include <cstdint>

namespace fsdp {

/// What becomes of the target's bytes.
enum class Caches {
  kFill,    ///< They go into the processor's caches: they are few, or will be read soon.
  kBypass,  ///< They go to memory past the caches, where the processor can do that (x86-64).
};

/// As std::memcpy, by parallel_for where there are many bytes. To fill a line of a cache, the processor first reads it from memory, so past
/// the caches two thirds of the bytes travel.
void parallel_copy(void* target, const void* source, std::int64_t bytes, Caches caches = Caches::kFill);

}  // namespace fsdp
