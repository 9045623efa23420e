#include "pinned.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "host_clock.h"

namespace sim {
namespace {

constexpr std::size_t kPage = 4096;
constexpr auto kPoison = std::byte{0xFF};

std::byte* at_address(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

class PinnedAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    const Lock lock;
    void* data = pinned_memory().allocate(bytes);
    return {data, data, &PinnedAllocator::free, c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // The copies themselves are known.
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void free(void* data) {
    const Lock lock;
    pinned_memory().free(data);
  }
};

}  // namespace

void* PinnedMemory::allocate(std::size_t bytes) {
  bytes = (bytes + kPage - 1) / kPage * kPage;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "sim: no memory to pin");
  blocks_[reinterpret_cast<std::uintptr_t>(data)].bytes = bytes;
  return data;
}

void PinnedMemory::free(void* data) {
  const auto block = blocks_.find(reinterpret_cast<std::uintptr_t>(data));
  block->second.is_freed = true;
  if (block->second.copies.empty()) unmap(block);
}

void PinnedMemory::unmap(Blocks::iterator block) {
  accesses().forget(block->first, block->first + block->second.bytes);
  munmap(at_address(block->first), block->second.bytes);
  blocks_.erase(block);
}

PinnedMemory::Blocks::const_iterator PinnedMemory::block_of(std::uintptr_t address) const {
  auto block = blocks_.upper_bound(address);
  if (block == blocks_.begin()) return blocks_.end();
  --block;
  return address < block->first + block->second.bytes ? block : blocks_.end();
}

/// Checks, and lets arrive, what the copy has in a part of its range.
void PinnedMemory::finish(const Copy& copy, const Range& part) {
  std::byte* const host = at_address(part.begin);
  const std::byte* const bytes = copy.bytes.data() + (part.begin - copy.range.begin);
  const auto size = part.end - part.begin;
  const bool is_untouched = copy.range.write ? std::all_of(host, host + size, [](std::byte byte) { return byte == kPoison; })
                                             : std::memcmp(host, bytes, size) == 0;
  if (!is_untouched) {
    report(std::string("pinned memory: the host wrote to what ") + describe(copy.access) + (copy.range.write ? " writes" : " reads") +
           ", before it knew that the copy was over");
  }
  if (copy.range.write) std::memcpy(host, bytes, size);
}

void PinnedMemory::use(const Range& range) {
  const auto block = block_of(range.begin);
  auto& copies = blocks_.at(block->first).copies;
  for (Copy& copy : std::exchange(copies, {})) {
    const Range shared{.begin = std::max(range.begin, copy.range.begin), .end = std::min(range.end, copy.range.end)};
    if (shared.begin >= shared.end) {
      copies.push_back(std::move(copy));
      continue;
    }
    finish(copy, shared);
    const auto keep = [&](std::uintptr_t begin, std::uintptr_t end) {
      if (begin >= end) return;
      const auto* bytes = copy.bytes.data() + (begin - copy.range.begin);
      copies.push_back({.range = {.begin = begin, .end = end, .write = copy.range.write},
                        .access = copy.access,
                        .bytes = {bytes, bytes + (end - begin)}});
    };
    keep(copy.range.begin, shared.begin);
    keep(shared.end, copy.range.end);
  }
}

void PinnedMemory::begin_copy(const Range& host, const Access& access) {
  std::byte* const data = at_address(host.begin);
  const auto size = host.end - host.begin;
  blocks_.at(block_of(host.begin)->first).copies.push_back({.range = host, .access = access, .bytes = {data, data + size}});
  if (host.write) std::memset(data, static_cast<int>(kPoison), size);
}

void PinnedMemory::arrive(const Clock& host) {
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    std::erase_if(block->second.copies, [&](const Copy& copy) {
      if (!host.knows(copy.access)) return false;
      if (!block->second.is_freed) finish(copy, copy.range);
      return true;
    });
    const auto next = std::next(block);
    if (block->second.is_freed && block->second.copies.empty()) unmap(block);
    block = next;
  }
}

PinnedMemory& pinned_memory() {
  static auto* const made = new PinnedMemory;
  return *made;
}

at::HostAllocator& pinned_allocator() {
  static auto* const made = new PinnedAllocator;
  return *made;
}

}  // namespace sim
