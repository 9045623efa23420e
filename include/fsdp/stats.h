#pragma once

#include <cstdint>

namespace fsdp {

/// Live and peak bytes of one kind of engine memory on this rank.
struct MemoryUse {
  std::int64_t live = 0;  ///< Now.
  std::int64_t peak = 0;  ///< The most since the start, or since reset_peak_memory_stats().
};

/// The memory that the engine holds for a model on this rank, counted exactly, in bytes. Activations, and gradients that autograd has not
/// yet delivered to the engine, belong to autograd and are not counted.
struct MemoryStats {
  MemoryUse main_parameters;          ///< Shards (or replicas) that the optimizer updates.
  MemoryUse main_gradients;           ///< Reduced gradients, which the optimizer reads.
  MemoryUse gathered_parameters;      ///< Unsharded parameters of units, for computation.
  MemoryUse unreduced_gradients;      ///< Gradients of units before their reduction.
  MemoryUse communication;            ///< Staging of reductions, and their error feedback.
  MemoryUse optimizer_state;          ///< Moments and other state of the optimizer for each element.
  MemoryUse total;                    ///< The sum of all of the above; its peak is the peak of the sum.
  MemoryUse host;                     ///< Offloaded main parameters, main gradients and optimizer state. Counted nowhere else.
  MemoryUse slots;                    ///< Bytes that the slot pool holds from the allocator, in use or free for reuse.
  MemoryUse shared_slots;             ///< The part of `slots` that other ranks of this host read directly. Each rank counts its own.
  std::int64_t slot_allocations = 0;  ///< Calls to the allocator so far; constant in the steady state.
};

/// Bytes that this rank sent and collectives that it started.
struct WireStats {
  std::int64_t all_gather_bytes = 0;      ///< Shards, sent to gather parameters.
  std::int64_t reduce_scatter_bytes = 0;  ///< Gradients, sent to be reduced; all-reduces, too.
  std::int64_t scatter_bytes = 0;         ///< Initial values, sent by another rank.
  std::int64_t control_bytes = 0;         ///< Small host-side exchanges: usage flags, gradient norms, checks.
  /// The part of all of these that other ranks of this host read from this rank's memory. The rest was sent.
  std::int64_t shared_memory_bytes = 0;
  std::int64_t all_gathers = 0;      ///< Started by this rank.
  std::int64_t reduce_scatters = 0;  ///< Started by this rank; all-reduces, too.
  std::int64_t scatters = 0;         ///< Scatters of initial values, started by this rank.
};

}  // namespace fsdp
