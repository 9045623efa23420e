#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "memory/accounting.h"
#include "memory/slot_plan.h"

namespace fsdp::memory {

class SlotPool;

/// A block of a pool, and the stream for which the allocator gave it. When it is given back, the allocator reuses it on that stream.
struct PoolBlock {
  c10::DataPtr memory;
  std::optional<c10::Stream> stream;  ///< None on the CPU.
  bool captured = false;              ///< Whether a captured graph uses the block whenever it is replayed.

  explicit operator bool() const { return static_cast<bool>(memory); }
};

/// For tests: whether blocks, of all pools on the CPU, are filled with NaN (of every floating-point dtype) when they are lent and when they
/// come back, so that tests detect results that were computed from unwritten or freed memory.
void fill_slots_with_nan(bool fill);

/// A lent block of device memory; returns to its pool when destroyed. Its bytes are not initialised.
class Slot {
 public:
  Slot() = default;
  Slot(Slot&& other) noexcept { *this = std::move(other); }
  Slot& operator=(Slot&& other) noexcept;
  ~Slot() { release(); }

  explicit operator bool() const { return pool_ != nullptr; }
  void* data() const { return block_.memory.get(); }
  /// The size that was requested; the block may be larger.
  std::int64_t bytes() const { return bytes_; }
  void release();

 private:
  friend class SlotPool;
  SlotPool* pool_ = nullptr;
  PoolBlock block_;
  std::int64_t bytes_ = 0;
  std::int64_t capacity_ = 0;
  std::size_t request_ = 0;   // the index of its request in the pool's record of the step
  std::uint64_t source_ = 0;  // the number of the pool's source when it lent the block
  Kind kind_ = Kind::kCommunication;
};

/// Blocks that are reused across units and steps [Bounded memory]: fresh pages cost more than the copies into them (page faults on
/// a CPU, allocator traffic on a GPU).
///
/// Without a plan, a request takes the smallest free block that fits; where none fits, the largest free block is given back to the
/// allocator and a block of the exact size is taken instead, so the pool holds no more blocks than were ever live at once. The same
/// sequence of requests in each step therefore allocates nothing from some early step on.
///
/// When two steps in a row have made the same requests, the steps after them follow a plan (plan_slots), if that needs less memory than the
/// pool holds. A request that the plan did not foresee (a validation pass, another order of layers) ends it until the step's end: later
/// requests are served as without a plan. The next step follows the plan again. A plan that two steps in a row did not follow is dropped.
///
/// On a GPU, a block goes back to the allocator as soon as it is free, unless a graph uses it or it comes from a source: the caching
/// allocator can provide such blocks again at once, and gives them to activations meanwhile.
///
/// On a GPU reuse needs no further synchronization: every use of a block is ordered on the stream that computes, because c10d's collectives
/// start after the work that this stream has at their call, and waiting for one orders the stream behind it. A block that goes back to the
/// allocator is recorded on that stream if it was allocated on another one.
///
/// A captured graph uses the blocks that were lent during the capture at each replay. They also serve later requests, but go back to the
/// allocator only with the pool.
///
/// Must outlive its slots. Not thread-safe: the engine serializes.
class SlotPool {
 public:
  /// What happens to free blocks.
  enum class Idle : std::uint8_t { kStays, kIsFreed };

  SlotPool(c10::Device device, Accounting& accounting) : SlotPool(device, accounting, device.is_cpu() ? Idle::kStays : Idle::kIsFreed) {}
  SlotPool(c10::Device device, Accounting& accounting, Idle idle) : device_(device), accounting_(accounting), idle_(idle) {}
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  /// Throws torch's out-of-memory error if the allocator has no memory.
  Slot acquire(std::int64_t bytes, Kind kind);

  /// New blocks come from `source`, on the pool's device; without one, from this process (allocate_shareable). Blocks of the previous
  /// source are given back: free ones now, lent ones when they return.
  using Source = std::function<c10::DataPtr(std::int64_t bytes)>;
  void set_source(Source source);
  bool has_source() const { return source_ != nullptr; }

  /// Ends a step. Does nothing while slots are lent: the step then continues, and is no longer recorded after kMaxRecord requests.
  void end_step();
  /// The number of requests of the present step that are recorded for a plan.
  std::size_t recorded() const { return requests_.size(); }
  /// The total size of the plan's blocks in bytes; 0 without a plan.
  std::int64_t planned_bytes() const { return plan_.total(); }

 private:
  friend class Slot;
  /// A step that never ends (inference, in which the root stays in use) must not grow its record for ever. A plan that saves memory has far
  /// fewer requests: a model of 10,000 units makes 60,000 in a step.
  static constexpr std::size_t kMaxRecord = 1U << 16U;
  static constexpr std::size_t kUnrecorded = static_cast<std::size_t>(-1);

  PoolBlock take_any(std::int64_t bytes, Kind kind, std::int64_t& capacity);
  PoolBlock allocate_block(std::int64_t bytes, Kind kind);
  void free_block(PoolBlock block, std::int64_t capacity);
  void free_blocks();
  void begin_plan();
  void leave_plan();
  void stop_recording();
  void give_back(Slot& slot);

  c10::Device device_;
  Accounting& accounting_;
  const Idle idle_;
  std::multimap<std::int64_t, PoolBlock> free_;               // by capacity in bytes
  std::vector<std::pair<std::int64_t, PoolBlock>> captured_;  // blocks of graphs that no request uses any more, with their capacities
  std::optional<c10::Stream> stream_;                         // the current stream when blocks are lent
  std::size_t lent_ = 0;
  Source source_;
  std::uint64_t sources_ = 0;  // the number of sources before the present one

  // This step so far, and the one before.
  std::size_t events_ = 0;
  bool too_long_ = false;  // More requests than are recorded.
  std::vector<SlotRequest> requests_;
  std::vector<SlotRequest> last_requests_;
  bool needs_no_plan_ = false;  // A plan of last_requests_ takes no less memory than the pool holds.

  std::vector<SlotRequest> planned_requests_;
  SlotPlan plan_;
  bool follows_plan_ = false;
  bool left_last_step_ = false;
  std::vector<PoolBlock>
      planned_;  // the block of each planned slot, if it is allocated and not lent (a moved-from DataPtr keeps its address)
  std::vector<bool> planned_lent_;
};

}  // namespace fsdp::memory
