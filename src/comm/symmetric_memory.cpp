#include "comm/symmetric_memory.h"

#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>

#include "comm/parts.h"

namespace fsdp::comm::symmetric_memory {
namespace {

/// Addresses of what allocate() gave. torch 2.11 can't tell. Blocks may be given back by other threads than those that communicate.
class Blocks {
 public:
  static Blocks& of_process() {
    static Blocks* const blocks = new Blocks;  // Outlives blocks that go at the end of the process.
    return *blocks;
  }
  void add(const void* address) {
    const std::lock_guard lock(mutex_);
    addresses_.insert(address);
  }
  void remove(const void* address) {
    const std::lock_guard lock(mutex_);
    addresses_.erase(address);
  }
  bool has(const void* address) {
    const std::lock_guard lock(mutex_);
    return addresses_.contains(address);
  }

 private:
  std::mutex mutex_;  // See the class.
  std::set<const void*> addresses_;
};

struct Block {
  c10::DataPtr memory;
};

void give_back(void* context) {
  auto* const block = static_cast<Block*>(context);
  Blocks::of_process().remove(block->memory.get());
  delete block;
}

}  // namespace

bool exists(c10::Device device) { return c10d::symmetric_memory::has_allocator(device.type()); }

c10::DataPtr allocate(c10::Device device, std::int64_t bytes) {
  auto memory = memory_of(c10d::symmetric_memory::empty_strided_p2p({bytes}, {1}, at::kByte, device, std::nullopt, std::nullopt));
  void* const address = memory.get();
  Blocks::of_process().add(address);
  return {address, new Block{std::move(memory)}, &give_back, device};
}

bool find_peers(const at::Tensor& tensor, const std::string& group) {
  if (tensor.numel() == 0 || !Blocks::of_process().has(tensor.storage().data())) return false;
  c10d::symmetric_memory::rendezvous(tensor, group);
  return true;
}

}  // namespace fsdp::comm::symmetric_memory
