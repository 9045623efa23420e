#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp {

/// Why a rank waited for a collective. A wait is divided among these.
enum class WaitReason : std::uint8_t {
  kLateRank,  ///< Another rank had not made the call yet. The rest of the wait comes after all ranks had.
  kPrefetch,  ///< The gather began only when its unit was needed, although a unit was computed before it: prefetch is too shallow.
  kQueue,     ///< Earlier collectives were under way; the share of their bytes in what had to be moved.
  kLink,      ///< The data were on their way.
  kHost,      ///< The data had arrived, and this rank was copying or adding them up.
};
inline constexpr std::size_t kWaitReasons = 5;  ///< How many there are.
/// "late rank", "prefetch", "queue", "link", "host".
const char* to_string(WaitReason reason);

}  // namespace fsdp
