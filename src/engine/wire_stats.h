#pragma once

#include <cstdint>

#include "comm/communicator.h"
#include "fsdp/stats.h"

namespace fsdp::engine {

inline WireStats stats_of(const comm::CommStats& stats) {
  return {.all_gather_bytes = stats.all_gather_bytes,
          .reduce_scatter_bytes = stats.reduce_scatter_bytes,
          .scatter_bytes = stats.scatter_bytes,
          .control_bytes = stats.control_bytes,
          .shared_memory_bytes = stats.shared_memory_bytes,
          .all_gathers = stats.all_gathers,
          .reduce_scatters = stats.reduce_scatters,
          .scatters = stats.scatters};
}

/// The bytes that were sent, including those that peers have read.
inline std::int64_t bytes_of(const comm::CommStats& stats) {
  return stats.all_gather_bytes + stats.reduce_scatter_bytes + stats.scatter_bytes + stats.control_bytes;
}

inline void add(WireStats& sum, const WireStats& stats) {
  sum.all_gather_bytes += stats.all_gather_bytes;
  sum.reduce_scatter_bytes += stats.reduce_scatter_bytes;
  sum.scatter_bytes += stats.scatter_bytes;
  sum.control_bytes += stats.control_bytes;
  sum.shared_memory_bytes += stats.shared_memory_bytes;
  sum.all_gathers += stats.all_gathers;
  sum.reduce_scatters += stats.reduce_scatters;
  sum.scatters += stats.scatters;
}

}  // namespace fsdp::engine
