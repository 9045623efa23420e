#pragma once

#include <cstdint>
#include <string_view>

#include "base/host_device.h"

namespace fsdp {

/// A hash that is the same on every rank (64-bit FNV-1a), which std::hash does not promise.
inline std::uint64_t stable_hash(std::string_view text) {
  std::uint64_t value = 14695981039346656037ULL;
  for (const unsigned char c : text) value = (value ^ c) * 1099511628211ULL;
  return value;
}

/// Mixes a number into a hash; the same on every rank.
FSDP_HOST_DEVICE constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 29);
}

}  // namespace fsdp
