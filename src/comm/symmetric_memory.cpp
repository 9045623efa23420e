#include "comm/symmetric_memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <unordered_map>
#include <utility>

#include "comm/parts.h"

namespace fsdp::comm::symmetric_memory {
namespace {

struct Block {
  c10::DataPtr memory;
  std::int64_t capacity = 0;
};

/// Blocks of this process, lent and free. Outlives blocks that go at its end.
class Blocks {
 public:
  static Blocks& of_process() {
    static Blocks* const blocks = new Blocks;
    return *blocks;
  }

  Block lend(c10::Device device, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    auto& free = free_[device];
    Block block;
    if (const auto fitting = free.lower_bound(bytes); fitting != free.end()) {
      block = {.memory = std::move(fitting->second), .capacity = fitting->first};
      free.erase(fitting);
    } else {
      const auto tensor = c10d::symmetric_memory::empty_strided_p2p({bytes}, {1}, at::kByte, device, std::nullopt, std::nullopt);
      block = {.memory = memory_of(tensor), .capacity = bytes};
    }
    lent_.insert(block.memory.get());
    is_used_ = true;
    return block;
  }

  void take_back(Block block) {
    const auto device = block.memory.device();
    // What is queued on any stream may still use it.
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
    const std::lock_guard lock(mutex_);
    lent_.erase(block.memory.get());
    free_[device].emplace(block.capacity, std::move(block.memory));
  }

  bool has_lent(const void* address) {
    if (!is_used_) return false;
    const std::lock_guard lock(mutex_);
    return lent_.contains(address);
  }

 private:
  // Blocks may be given back by other threads than those that communicate.
  std::mutex mutex_;
  std::unordered_map<c10::Device, std::multimap<std::int64_t, c10::DataPtr>> free_;  // by capacity in bytes
  std::set<const void*> lent_;                                                       // torch 2.11 can't tell
  std::atomic<bool> is_used_ = false;
};

void take_back(void* context) {
  auto* const block = static_cast<Block*>(context);
  Blocks::of_process().take_back(std::move(*block));
  delete block;
}

}  // namespace

bool exists(c10::Device device) { return c10d::symmetric_memory::has_allocator(device.type()); }

c10::DataPtr allocate(c10::Device device, std::int64_t bytes) {
  auto* const block = new Block(Blocks::of_process().lend(device, bytes));
  return {block->memory.get(), block, &take_back, device};
}

bool find_peers(const at::Tensor& tensor, const std::string& group) {
  if (tensor.numel() == 0 || !Blocks::of_process().has_lent(tensor.storage().data())) return false;
  c10d::symmetric_memory::rendezvous(tensor, group);
  return true;
}

}  // namespace fsdp::comm::symmetric_memory
