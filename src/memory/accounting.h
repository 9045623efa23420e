#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

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
/// counted here; nothing is estimated. Not thread-safe: the engine serializes.
class Accounting {
 public:
  void add(Kind kind, std::int64_t bytes);
  void remove(Kind kind, std::int64_t bytes);
  /// Count bytes within a block of the pool.
  void lend(Kind kind, std::int64_t bytes);
  void take_back(Kind kind, std::int64_t bytes);
  /// `shared`: peers of this host may map these bytes.
  void pool_grew(std::int64_t bytes, bool shared = false);
  void pool_shrank(std::int64_t bytes, bool shared = false);

  MemoryStats stats() const;
  /// The bytes that are held now: of all kinds that count for the total, and of one kind.
  std::int64_t live() const { return total_.live; }
  std::int64_t live(Kind kind) const { return by_kind_[static_cast<std::size_t>(kind)].live; }
  /// Peaks start again from the bytes that are live now.
  void reset_peaks();

  /// The bytes that are held from the allocators of the device now: as the total, with the pool's blocks instead of lent bytes.
  std::int64_t held() const { return total_.live - lent_ + pool_.live; }
  /// Calls `grew` whenever held() may have grown, from now on. For plans; it must not use the engine.
  void watch(std::function<void()> grew) { grew_ = std::move(grew); }

  /// The peak of the total, or of one kind, since the last begin_step(), whatever reset_peaks() does.
  std::int64_t peak_of_step() const { return peak_of_step_; }
  std::int64_t peak_of_step(Kind kind) const { return peaks_of_step_[static_cast<std::size_t>(kind)]; }
  void begin_step();

 private:
  std::array<MemoryUse, 7> by_kind_{};
  MemoryUse total_;
  MemoryUse pool_;
  MemoryUse shared_;
  std::int64_t pool_allocations_ = 0;
  std::int64_t peak_of_step_ = 0;
  std::array<std::int64_t, 7> peaks_of_step_{};
  std::int64_t lent_ = 0;
  std::function<void()> grew_;
};

}  // namespace fsdp::memory
