#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/host_device.h"

namespace fsdp::optim {

/// The 256 numbers in [-1, 1] or [0, 1] that 8-bit codes stand for: Dettmers' "dynamic" map. Each decade below 1 has half as many of these
/// numbers as the one above. Large numbers are thus kept to about a hundredth, and small ones do not become zero. The numbers ascend with
/// the code; 0 and 1 are among them.
class DynamicMap {
 public:
  explicit DynamicMap(bool is_signed);

  FSDP_HOST_DEVICE float decode(std::uint8_t code) const { return values_[code]; }

  /// Returns the code of the nearest number; if two are equally near, the lower one. x must lie in the map's range. NaN gives any code.
  ///
  /// Two small tables instead of a search: the leading bits of x (sign, exponent, some of the mantissa) lead to the lowest code of all
  /// floats that begin so. These lie closer together than the bounds between codes do, so x has that code or the next one, which one
  /// comparison decides. Without branches, and from 4-byte tables: a compiler can do it for a vector register at a time.
  FSDP_HOST_DEVICE std::int32_t encode(float x) const {
    std::int32_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    std::int32_t bucket = ((bits & 0x7FFFFFFF) >> dropped_) - first_;
    bucket = bucket < 0 ? 0 : bucket;  // everything below the first bucket is nearest to zero, too
    bucket = bucket > last_ ? last_ : bucket;
    const std::int32_t code = lowest_[bucket + ((bits >> 31) & negative_)];
    return code + static_cast<std::int32_t>(x > upper_[code]);
  }

 private:
  // Buckets begin at 2^-23, which is less than half of the least number, and end with the one that begins at 1. They need 6 bits of
  // mantissa to distinguish the signed map's numbers, 7 for the unsigned map's.
  static constexpr int kBinades = 23;
  static constexpr std::size_t kBuckets = (kBinades << 7) + 1;

  // Plain arrays: a kernel reads the copy of a map on its device.
  float values_[256] = {};
  float upper_[256] = {};                   // the largest float that belongs to a code
  std::int32_t lowest_[kBuckets + 1] = {};  // by bucket; negative numbers' buckets come second
  std::int32_t dropped_;                    // bits of mantissa that a bucket does not distinguish
  std::int32_t first_;                      // leading bits of the first bucket
  std::int32_t last_;                       // index of the last bucket
  std::int32_t negative_;                   // where negative numbers' buckets begin; 0 in the unsigned map
};

}  // namespace fsdp::optim
