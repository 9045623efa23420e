#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp {

/// The same on every rank, unlike std::hash in general (64-bit FNV-1a).
inline std::uint64_t stable_hash(std::string_view text) {
  std::uint64_t value = 14695981039346656037ULL;
  for (const unsigned char c : text) value = (value ^ c) * 1099511628211ULL;
  return value;
}

}  // namespace fsdp
