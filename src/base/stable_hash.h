#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp {

/// A hash that is the same on every rank (64-bit FNV-1a), which std::hash does not promise.
inline std::uint64_t stable_hash(std::string_view text) {
  std::uint64_t value = 14695981039346656037ULL;
  for (const unsigned char c : text) value = (value ^ c) * 1099511628211ULL;
  return value;
}

}  // namespace fsdp
