#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace fsdp::engine {

enum class Pass : std::uint8_t { kForward, kBackward };

/// Records which unit followed which, separately for forward and backward, to predict the next units [Read ahead].
///
/// The record is a second-order successor table: (unit before, unit) -> unit that followed last time. It needs no notion of where a pass
/// begins or ends, so validation passes, skipped layers and changed orders correct it as they happen, and a unit that is used in several
/// places (A B A C) is predicted by what came before it. A wrong prediction costs time, never correctness. Predictions depend on the order
/// of moves only, never on timing: all ranks predict the same.
class Schedule {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  /// Begins a pass. The next unit has no predecessor, and the last unit of the pass before has no successor.
  void begin(Pass pass);
  /// The computation moved to `unit`.
  void move_to(std::size_t unit);
  /// The units expected next, nearest first: at most `depth` different ones.
  std::vector<std::size_t> next(int depth) const;
  /// The units of the last pass of this kind that has ended, in its order.
  const std::vector<std::size_t>& recorded(Pass pass) const { return recorded_[static_cast<std::size_t>(pass)]; }
  Pass pass() const { return pass_; }

 private:
  static std::uint64_t key(std::size_t before, std::size_t unit) {
    return (static_cast<std::uint64_t>(before + 1) << 32) | static_cast<std::uint64_t>(unit + 1);
  }

  Pass pass_ = Pass::kForward;
  std::size_t before_ = kNone;
  std::size_t current_ = kNone;
  std::array<std::unordered_map<std::uint64_t, std::size_t>, 2> successor_;
  std::vector<std::size_t> moves_;  // of this pass
  std::array<std::vector<std::size_t>, 2> recorded_;
};

}  // namespace fsdp::engine
