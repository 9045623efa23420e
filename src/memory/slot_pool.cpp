#include "memory/slot_pool.h"

#include <iterator>
#include <utility>

#include "memory/device_memory.h"

namespace fsdp::memory {

Slot& Slot::operator=(Slot&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::exchange(other.pool_, nullptr);
    memory_ = std::move(other.memory_);
    bytes_ = other.bytes_;
    capacity_ = other.capacity_;
    kind_ = other.kind_;
  }
  return *this;
}

void Slot::release() {
  if (pool_ != nullptr) std::exchange(pool_, nullptr)->give_back(*this);
}

SlotPool::SlotPool(c10::Device device, Accounting& accounting) : device_(device), accounting_(accounting) {}

SlotPool::~SlotPool() {
  for (const auto& [capacity, memory] : free_) accounting_.pool_shrank(capacity);
}

Slot SlotPool::acquire(std::int64_t bytes, Kind kind) {
  Slot slot;
  auto fit = free_.lower_bound(bytes);
  if (fit != free_.end()) {
    slot.capacity_ = fit->first;
    slot.memory_ = std::move(fit->second);
    free_.erase(fit);
  } else {
    if (!free_.empty()) {
      const auto largest = std::prev(free_.end());
      accounting_.pool_shrank(largest->first);
      free_.erase(largest);
    }
    slot.memory_ = allocate(device_, bytes);
    slot.capacity_ = bytes;
    accounting_.pool_grew(bytes);
  }
  slot.pool_ = this;
  slot.bytes_ = bytes;
  slot.kind_ = kind;
  accounting_.add(kind, bytes);
  return slot;
}

void SlotPool::give_back(Slot& slot) {
  accounting_.remove(slot.kind_, slot.bytes_);
  free_.emplace(slot.capacity_, std::move(slot.memory_));
}

}  // namespace fsdp::memory
