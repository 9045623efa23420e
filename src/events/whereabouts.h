#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "events/event.h"

namespace fsdp::events {

/// Where the computation of a process is, from the events of its engines in the order of time.
class Whereabouts {
 public:
  enum class Pass : std::uint8_t { kNone, kForward, kBackward, kBetweenSteps };

  /// Returns whether the event tells where the computation is.
  bool take(const Event& event) noexcept;

  Pass pass() const noexcept { return pass_; }
  /// A name; 0 where no unit has been entered in this pass.
  std::uint32_t unit() const noexcept { return unit_; }
  /// The time of the last event of an engine; 0 if there was none.
  std::int64_t since() const noexcept { return since_; }
  /// "in forward of 'blocks.1'", with the text of unit().
  std::string describe(std::string_view unit) const;

 private:
  Pass pass_ = Pass::kNone;
  std::uint32_t unit_ = 0;
  std::int64_t since_ = 0;
};

/// Returns " of 'blocks.0'", or " of the root unit". Returns nothing for "" and what is no unit, "(buffers)" for example.
std::string of_unit_text(std::string_view unit);

}  // namespace fsdp::events
