#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp {

/// Why a rank waited for a collective. The time of a wait is divided among these reasons.
enum class WaitReason : std::uint8_t {
  kLateRank,  ///< Another rank had not called the collective yet. The other reasons apply to the time after all ranks had called it.
  kPrefetch,  ///< The gather began only when its unit was needed, although it could have begun during an earlier unit.
  kQueue,     ///< Earlier collectives were running; a part of the wait in proportion to their bytes.
  kLink,      ///< The data were being sent.
  kHost,      ///< The data had arrived, and this rank was copying or adding them up.
};
inline constexpr std::size_t kWaitReasons = 5;  ///< How many there are.
/// "late rank", "prefetch", "queue", "link", "host".
const char* to_string(WaitReason reason);

}  // namespace fsdp
