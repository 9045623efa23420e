#include "memory/slot_pool.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/stream_capture.h"
#include "memory/device_memory.h"
#include "memory/shared_heap.h"

namespace fsdp::memory {
namespace {

std::atomic<bool> filled_with_nan = false;

void spoil(const c10::DataPtr& memory, std::int64_t bytes) {
  if (!filled_with_nan.load(std::memory_order_relaxed) || !memory.device().is_cpu() || bytes == 0) return;
  std::memset(memory.get(), 0xff, static_cast<std::size_t>(bytes));
}

}  // namespace

void fill_slots_with_nan(bool fill) { filled_with_nan = fill; }

Slot& Slot::operator=(Slot&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::exchange(other.pool_, nullptr);
    block_ = std::move(other.block_);
    bytes_ = other.bytes_;
    capacity_ = other.capacity_;
    request_ = other.request_;
    source_ = other.source_;
    kind_ = other.kind_;
  }
  return *this;
}

void Slot::release() {
  if (pool_ != nullptr) std::exchange(pool_, nullptr)->give_back(*this);
}

SlotPool::~SlotPool() {
  leave_plan();
  free_blocks();
  for (auto& [capacity, block] : std::exchange(captured_, {})) {
    block.captured = false;
    free_block(std::move(block), capacity);
  }
}

void SlotPool::free_blocks() {
  for (auto& [capacity, block] : free_) free_block(std::move(block), capacity);
  free_.clear();
}

void SlotPool::free_block(PoolBlock block, std::int64_t capacity) {
  if (block.captured) {
    captured_.emplace_back(capacity, std::move(block));
    return;
  }
  accounting_.pool_shrank(capacity, SharedHeap::is_block(block.memory));
  if (block.stream != stream_) c10::impl::VirtualGuardImpl(device_.type()).recordDataPtrOnStream(block.memory, *stream_);
}

void SlotPool::set_source(Source source) {
  leave_plan();
  free_blocks();
  source_ = std::move(source);
  ++sources_;
}

Slot SlotPool::acquire(std::int64_t bytes, Kind kind) {
  Slot slot;
  if (!device_.is_cpu() && !device_.is_meta()) stream_ = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (requests_.size() == kMaxRecord) stop_recording();
  // Where blocks do not stay, there is nothing to plan.
  const bool records = !too_long_ && (idle_ == Idle::kStays || source_);
  const auto request = records ? requests_.size() : kUnrecorded;
  if (follows_plan_ &&
      (request >= planned_requests_.size() || planned_requests_[request].bytes != bytes || planned_lent_[plan_.slot_of[request]])) {
    leave_plan();
  }
  if (follows_plan_) {
    const auto planned = plan_.slot_of[request];
    slot.capacity_ = plan_.capacities[planned];
    slot.block_ = planned_[planned] ? std::exchange(planned_[planned], {}) : allocate_block(slot.capacity_, kind);
    planned_lent_[planned] = true;
  } else {
    slot.block_ = take_any(bytes, kind, slot.capacity_);
  }
  if (records) requests_.push_back({.bytes = bytes, .begin = events_++, .end = 0});
  ++lent_;
  slot.pool_ = this;
  slot.bytes_ = bytes;
  slot.request_ = request;
  slot.source_ = sources_;
  slot.kind_ = kind;
  if (stream_ && is_capturing(*stream_)) slot.block_.captured = true;
  spoil(slot.block_.memory, bytes);
  accounting_.lend(kind, bytes);
  return slot;
}

PoolBlock SlotPool::take_any(std::int64_t bytes, Kind kind, std::int64_t& capacity) {
  auto fit = free_.lower_bound(bytes);
  if (fit != free_.end()) {
    capacity = fit->first;
    auto block = std::move(fit->second);
    free_.erase(fit);
    return block;
  }
  if (!free_.empty()) {
    const auto largest = std::prev(free_.end());
    free_block(std::move(largest->second), largest->first);
    free_.erase(largest);
  }
  capacity = bytes;
  return allocate_block(bytes, kind);
}

/// Other kinds may use it later; it is named for the one that it is made for.
PoolBlock SlotPool::allocate_block(std::int64_t bytes, Kind kind) {
  RECORD_USER_SCOPE(allocation_range(kind));
  auto memory = source_ ? source_(bytes) : allocate_shareable(device_, bytes);
  accounting_.pool_grew(bytes, SharedHeap::is_block(memory));
  return {.memory = std::move(memory), .stream = stream_};
}

void SlotPool::give_back(Slot& slot) {
  spoil(slot.block_.memory, slot.bytes_);
  accounting_.take_back(slot.kind_, slot.bytes_);
  --lent_;
  if (slot.request_ < requests_.size()) requests_[slot.request_].end = events_++;
  const bool stays = idle_ == Idle::kStays || source_ || slot.block_.captured;
  if (slot.source_ != sources_ || !stays) {
    free_block(std::exchange(slot.block_, {}), slot.capacity_);
  } else if (follows_plan_) {
    const auto planned = plan_.slot_of[slot.request_];
    planned_[planned] = std::move(slot.block_);
    planned_lent_[planned] = false;
  } else {
    free_.emplace(slot.capacity_, std::move(slot.block_));
  }
}

/// Ends the plan: its free blocks now serve any request, and lent blocks do so when they come back.
void SlotPool::leave_plan() {
  if (!std::exchange(follows_plan_, false)) return;
  for (std::size_t planned = 0; planned < planned_.size(); ++planned) {
    if (planned_[planned]) free_.emplace(plan_.capacities[planned], std::exchange(planned_[planned], {}));
  }
}

void SlotPool::stop_recording() {
  leave_plan();
  requests_ = {};
  too_long_ = true;
  needs_no_plan_ = false;
}

void SlotPool::end_step() {
  if (lent_ > 0) return;
  if (std::exchange(too_long_, false)) {
    requests_ = {};
    events_ = 0;
  }
  if (requests_.empty()) return;
  const bool left = !planned_requests_.empty() && !follows_plan_;
  // A plan that two steps in a row have left no longer fits.
  if (left && left_last_step_) planned_requests_.clear();
  left_last_step_ = left;
  const bool repeats = requests_ == last_requests_;
  if (!repeats) needs_no_plan_ = false;
  if (planned_requests_.empty() && repeats && !needs_no_plan_) {
    auto plan = plan_slots(requests_);
    std::int64_t held = 0;
    for (const auto& [capacity, block] : free_) held += capacity;
    if (plan.total() < held) {
      plan_ = std::move(plan);
      planned_requests_ = requests_;
    } else {
      needs_no_plan_ = true;
    }
  }
  if (planned_requests_.empty()) plan_ = {};
  last_requests_ = std::exchange(requests_, {});
  events_ = 0;
  if (!follows_plan_ && !planned_requests_.empty()) begin_plan();
}

void SlotPool::begin_plan() {
  follows_plan_ = true;
  planned_.clear();
  planned_lent_.assign(plan_.capacities.size(), false);
  for (const auto capacity : plan_.capacities) {
    const auto block = free_.find(capacity);
    planned_.push_back(block == free_.end() ? PoolBlock() : std::move(block->second));
    if (block != free_.end()) free_.erase(block);
  }
  free_blocks();
}

}  // namespace fsdp::memory
