#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "fsdp/stats.h"

namespace fsdp::memory {

enum class Kind : std::uint8_t {
  kMainParameters,
  kMainGradients,
  kGatheredParameters,
  kUnreducedGradients,
  kCommunication,
  kOptimizerState,
  kHost,  ///< Offloaded data; not a part of the total.
};

/// The range of torch's profiler in which such memory is allocated: profiles with memory, NVTX (emit_nvtx) and memory snapshots with
/// annotations show it by this name.
const char* allocation_range(Kind kind);

/// Counts live and peak bytes by kind, and those of the pool behind the slots. Every allocation and release of the engine's memory is
/// entered here; nothing is estimated. Not thread-safe: the engine serializes.
class Accounting {
 public:
  void add(Kind kind, std::int64_t bytes);
  void remove(Kind kind, std::int64_t bytes);
  /// `shared`: peers of this host may map these bytes.
  void pool_grew(std::int64_t bytes, bool shared = false);
  void pool_shrank(std::int64_t bytes, bool shared = false);

  MemoryStats stats() const;
  /// Peaks start again from what is live now.
  void reset_peaks();

  /// The peak of the total since the last begin_step(), whatever reset_peaks() does.
  std::int64_t peak_of_step() const { return peak_of_step_; }
  void begin_step() { peak_of_step_ = total_.live; }

 private:
  std::array<MemoryUse, 7> by_kind_{};
  MemoryUse total_;
  MemoryUse pool_;
  MemoryUse shared_;
  std::int64_t pool_allocations_ = 0;
  std::int64_t peak_of_step_ = 0;
};

}  // namespace fsdp::memory
