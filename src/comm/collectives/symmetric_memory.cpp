#include "comm/collectives/symmetric_memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>
#include <vector>

#include "comm/parts.h"

namespace fsdp::comm::symmetric_memory {
namespace {

/// The symmetric memory that this process has allocated, for all of its sources: which of it is lent, and which is kept.
class Allocations {
 public:
  /// It is never destroyed, because blocks may be freed at the end of the process.
  static Allocations& of_process() {
    static Allocations* const allocations = new Allocations;
    return *allocations;
  }

  c10::DataPtr allocate(c10::Device device, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    is_used_ = true;
    return memory_of(c10d::symmetric_memory::empty_strided_p2p({bytes}, {1}, at::kByte, device, std::nullopt, std::nullopt));
  }
  void lend(const void* address) {
    const std::lock_guard lock(mutex_);
    lent_.insert(address);
  }
  void take_back(const void* address) {
    const std::lock_guard lock(mutex_);
    lent_.erase(address);
  }
  bool has_lent(const void* address) {
    if (!is_used_) return false;
    const std::lock_guard lock(mutex_);
    return lent_.contains(address);
  }
  /// Keeps memory that is no longer used.
  void keep(c10::DataPtr memory) {
    const std::lock_guard lock(mutex_);
    kept_.push_back(std::move(memory));
  }

 private:
  // Blocks may be given back by other threads than those that communicate.
  std::mutex mutex_;
  std::set<const void*> lent_;  // torch 2.11 does not report these
  std::vector<c10::DataPtr> kept_;
  std::atomic<bool> is_used_ = false;
};

/// The blocks of one source.
class Blocks : public std::enable_shared_from_this<Blocks> {
 public:
  explicit Blocks(c10::Device device) : device_(device) {}
  ~Blocks() {
    for (auto& [capacity, memory] : free_) Allocations::of_process().keep(std::move(memory));
  }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  c10::DataPtr lend(std::int64_t bytes) {
    auto lent = std::make_unique<Lent>(Lent{.memory = {}, .capacity = bytes, .source = shared_from_this()});
    {
      const std::lock_guard lock(mutex_);
      if (const auto fitting = free_.lower_bound(bytes); fitting != free_.end()) {
        lent->capacity = fitting->first;
        lent->memory = std::move(fitting->second);
        free_.erase(fitting);
      }
    }
    if (!lent->memory) lent->memory = Allocations::of_process().allocate(device_, bytes);
    void* const address = lent->memory.get();
    Allocations::of_process().lend(address);
    return {address, lent.release(), &take_back, device_};
  }

 private:
  struct Lent {
    c10::DataPtr memory;
    std::int64_t capacity;
    std::shared_ptr<Blocks> source;
  };

  static void take_back(void* context) {
    const std::unique_ptr<Lent> lent(static_cast<Lent*>(context));
    const auto device = lent->source->device_;
    Allocations::of_process().take_back(lent->memory.get());
    try {
      // Queued work on any stream may still use it.
      if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
    } catch (...) {  // The device has failed, and an exception reports it.
      return Allocations::of_process().keep(std::move(lent->memory));
    }
    const std::lock_guard lock(lent->source->mutex_);
    lent->source->free_.emplace(lent->capacity, std::move(lent->memory));
  }

  const c10::Device device_;
  std::mutex mutex_;                                // as Allocations'
  std::multimap<std::int64_t, c10::DataPtr> free_;  // by capacity in bytes
};

}  // namespace

bool exists(c10::Device device) { return c10d::symmetric_memory::has_allocator(device.type()); }

MemorySource source(c10::Device device) {
  return [blocks = std::make_shared<Blocks>(device)](std::int64_t bytes) { return blocks->lend(bytes); };
}

bool find_peers(const at::Tensor& tensor, const std::string& group) {
  if (tensor.numel() == 0 || !Allocations::of_process().has_lent(tensor.storage().data())) return false;
  c10d::symmetric_memory::rendezvous(tensor, group);
  return true;
}

}  // namespace fsdp::comm::symmetric_memory
