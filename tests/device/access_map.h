#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "clock.h"

namespace sim {

/// Bytes that an operation reads or writes, by the device's or the host's addresses.
struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool write = false;
};

/// The last write of each byte, and the reads since. It is keyed by address and outlives what is allocated there, so that memory which is
/// used again too early shows.
class AccessMap {
 public:
  enum class Conflict { kReadAfterWrite, kWriteAfterWrite, kWriteAfterRead };
  using OnConflict = std::function<void(Conflict conflict, const Access& earlier)>;

  /// Notes an access by somebody with this clock. `on_conflict` gets what it is not ordered behind.
  void add(const Clock& clock, const Access& access, const Range& range, const OnConflict& on_conflict);
  /// The last write and the reads since, of each byte in the range.
  void for_each(std::uintptr_t begin, std::uintptr_t end, const std::function<void(const Access&)>& visit);
  /// Addresses that somebody else may get.
  void forget(std::uintptr_t begin, std::uintptr_t end);

 private:
  struct Cell {
    std::uintptr_t end = 0;
    Access write;
    std::vector<Access> reads;
  };
  using Cells = std::map<std::uintptr_t, Cell>;  // by their first byte

  void cut(std::uintptr_t address);
  void fill(std::uintptr_t begin, std::uintptr_t end);

  Cells cells_;
};

}  // namespace sim
