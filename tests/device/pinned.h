#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "streams.h"

namespace sim {

/// Host memory that the device copies from and to while the host goes on. Until the host knows that a copy is over,
/// - a copy's destination has bytes of 0xFF, and must have them still when the copy's bytes arrive: else the host has written there;
/// - a copy's source must be as it was: else the host has written there.
/// That is exact to the byte. Whoever reads too early gets NaN.
class PinnedMemory {
 public:
  void* allocate(std::size_t bytes);
  /// Its pages are kept until the copies from and to it are over.
  void free(void* data);
  bool contains(const void* data) const { return block_of(reinterpret_cast<std::uintptr_t>(data)) != blocks_.end(); }

  /// Before a copy uses this range. What other copies have left there arrives; that they are ordered, launch() checks.
  void use(const Range& range);
  /// A copy that the host has not waited for has been done. `host.write`: to the host.
  void begin_copy(const Range& host, const Access& access);
  /// The host knows more.
  void arrive(const Clock& host);

 private:
  struct Copy {
    Range range;
    Access access;
    std::vector<std::byte> bytes;  ///< Of the source, at the copy's time.
  };
  struct Block {
    std::size_t bytes = 0;
    bool is_freed = false;
    std::vector<Copy> copies;
  };
  using Blocks = std::map<std::uintptr_t, Block>;

  Blocks::const_iterator block_of(std::uintptr_t address) const;
  static void finish(const Copy& copy, const Range& part);
  void unmap(Blocks::iterator block);

  Blocks blocks_;  // by address
};

/// Under the lock.
PinnedMemory& pinned_memory();
at::HostAllocator& pinned_allocator();

}  // namespace sim
