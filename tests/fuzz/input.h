#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace fsdp::testing {

/// What a reader must guarantee for any input.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

/// Defined by replay.cpp only, which watches memory up to the call: what a target does with what was read is not the reader's.
void stop_watching_memory() __attribute__((weak));

inline void reader_is_done() {
  if (stop_watching_memory != nullptr) stop_watching_memory();
}

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) { return {reinterpret_cast<const char*>(data), size}; }

}  // namespace fsdp::testing
