#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>
#include <vector>

// Symmetric memory on the CPU, where torch has none: memory as any other, and a record of who was to find it.
namespace fsdp::testing {

class SymmetricAllocator final : public c10d::symmetric_memory::SymmetricMemoryAllocator {
 public:
  struct Meeting {
    std::int64_t allocation;  ///< The how many-th block.
    std::string group;
    bool operator==(const Meeting&) const = default;
  };

  /// From now on, torch has such memory on the CPU in this process.
  static c10::intrusive_ptr<SymmetricAllocator> install() {
    auto allocator = c10::make_intrusive<SymmetricAllocator>();
    c10d::symmetric_memory::register_allocator(c10::kCPU, allocator);
    return allocator;
  }

  void* alloc(std::size_t size, int, const std::optional<std::string>&) override {
    void* const block = std::aligned_alloc(64, (size + 63) / 64 * 64);
    number_of_[block] = static_cast<std::int64_t>(allocated.size());
    allocated.push_back(size);
    return block;
  }
  void free(void* block) override {
    ++freed;
    std::free(block);
  }
  std::size_t get_alloc_size(void*) override { return 0; }
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> rendezvous(void* block, const std::optional<std::string>& group) override {
    if (refuses) throw std::runtime_error("no window");
    meetings.push_back({number_of_.at(block), group.value_or("")});
    return {};
  }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return "FAKE"; }

  std::vector<std::size_t> allocated;  ///< Bytes of each block so far.
  int freed = 0;
  std::vector<Meeting> meetings;
  bool refuses = false;

 private:
  std::map<const void*, std::int64_t> number_of_;
};

}  // namespace fsdp::testing
