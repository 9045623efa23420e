#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

#include "fsdp/save_load.h"

namespace fsdp::state {

/// Reports to the program how long each phase took.
class Phases {
 public:
  explicit Phases(OnPhase on_phase) : on_phase_(std::move(on_phase)) {}

  /// The phase that began when the last one ended (the first one: when this was made) ends.
  void end(Phase phase, std::int64_t bytes) {
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double> elapsed = now - std::exchange(begin_, now);
    if (on_phase_) on_phase_({.phase = phase, .bytes = bytes, .seconds = elapsed.count()});
  }

 private:
  OnPhase on_phase_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace fsdp::state
