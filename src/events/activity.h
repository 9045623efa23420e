#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace fsdp::events {

/// Identifies a collective: the source of its row, and its number there.
using CollectiveKey = std::pair<std::uint32_t, std::uint64_t>;

/// The activity of a rank: its computation is in `unit`, or it waits for a collective.
struct Activity {
  enum class Kind : std::uint8_t { kUnknown, kForward, kBackward, kBetweenSteps, kWaiting };
  Kind kind = Kind::kUnknown;
  std::uint32_t unit = 0;      ///< A name; 0: no unit has been entered in this pass. With kWaiting, the collective's unit.
  std::uint32_t next = 0;      ///< The unit that the computation entered afterwards; 0: it did not enter one.
  CollectiveKey awaited = {};  ///< With kWaiting.
};

/// Returns "in forward of 'blocks.2', before 'blocks.3'", for what a rank did in some time. Names may be empty.
std::string activity_text(Activity::Kind kind, std::string_view unit, std::string_view next);

/// Returns "in forward of 'blocks.1'", for where a computation is now.
std::string position_text(Activity::Kind kind, std::string_view unit);

/// Returns "the all-gather of 'blocks.0'", or "a collective" if its operation is not known.
std::string call_text(std::string_view operation, std::string_view unit);

}  // namespace fsdp::events
