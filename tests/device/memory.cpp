#include "memory.h"

#include <ATen/ATen.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "host_clock.h"
#include "streams.h"

namespace sim {
namespace {

constexpr std::size_t kWindow = std::size_t{1} << 34;  // addresses of a device
constexpr std::size_t kBlock = 512;                    // sizes are multiples of it
constexpr std::size_t kSegment = std::size_t{2} << 20;

struct Block {
  std::size_t bytes = 0;
  std::uintptr_t segment = 0;  ///< Blocks of one segment become one again.
  c10::StreamId stream = 0;    ///< Whose blocks it may be.
  CaptureId pool = 0;          ///< Of which graph it is; 0: of none.
  std::uint64_t number = 0;    ///< Of its allocation.
  bool is_used = false;
  std::set<c10::StreamId> recorded;
  std::optional<Clock> until;  ///< It is freed, but recorded streams use it until then.
};
using Blocks = std::map<std::uintptr_t, Block>;

struct Memory {
  std::uintptr_t begin = 0;
  std::uintptr_t behind = 0;  ///< What is added to a device's address.
  std::uintptr_t unused = 0;  ///< From here on.
  std::uint64_t allocations = 0;
  Blocks blocks;
};

std::array<Memory, kDevices>& all_memory() {
  static auto* const made = new std::array<Memory, kDevices>;  // Tensors are freed when the program ends, too.
  return *made;
}

Memory& memory_of(int device) {
  Memory& memory = all_memory().at(static_cast<std::size_t>(device));
  if (memory.begin != 0) return memory;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const window = mmap(nullptr, kWindow, PROT_NONE, kFlags, -1, 0);
  void* const real = mmap(nullptr, kWindow, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  TORCH_CHECK(window != MAP_FAILED && real != MAP_FAILED, "sim: no addresses for device ", device);
  memory.begin = memory.unused = reinterpret_cast<std::uintptr_t>(window);
  memory.behind = reinterpret_cast<std::uintptr_t>(real) - memory.begin;
  return memory;
}

std::size_t rounded(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

void poison(const Memory& memory, std::uintptr_t address, std::size_t bytes) {
  std::memset(reinterpret_cast<void*>(address + memory.behind), 0xFF, bytes);
}

void give_back(Memory& memory, Blocks::iterator block) {
  block->second.is_used = false;
  block->second.until.reset();
  block->second.recorded.clear();
  poison(memory, block->first, block->second.bytes);
  const auto merge = [&](Blocks::iterator left, Blocks::iterator right) {
    if (left->second.is_used || right->second.is_used || left->second.segment != right->second.segment) return;
    if (left->second.pool != right->second.pool) return;
    left->second.bytes += right->second.bytes;
    memory.blocks.erase(right);
  };
  if (const auto next = std::next(block); next != memory.blocks.end()) merge(block, next);
  if (block != memory.blocks.begin()) merge(std::prev(block), block);
}

/// What recorded streams no longer use.
void give_back_what_is_over(Memory& memory, int device) {
  std::vector<std::uintptr_t> over;
  for (const auto& [address, block] : memory.blocks) {
    if (!block.until) continue;
    const c10::Stream stream(c10::Stream::UNSAFE, sim::device(device), block.stream);
    if (clock_of(stream).knows(*block.until)) over.push_back(address);
  }
  for (const auto address : over) give_back(memory, memory.blocks.find(address));
}

Blocks::iterator new_segment(Memory& memory, int device, std::size_t bytes, c10::StreamId stream, CaptureId pool) {
  bytes = rounded(bytes, kSegment);
  TORCH_CHECK_WITH(OutOfMemoryError, memory.unused + bytes <= memory.begin + kWindow, "sim: device ", device, " is out of memory");
  const auto segment = std::exchange(memory.unused, memory.unused + bytes);
  poison(memory, segment, bytes);
  stats_of(device).reserved += static_cast<std::int64_t>(bytes);
  return memory.blocks
      .emplace(segment, Block{.bytes = bytes, .segment = segment, .stream = stream, .pool = pool, .recorded = {}, .until = {}})
      .first;
}

/// The smallest one that fits.
Blocks::iterator free_block(Memory& memory, int device, std::size_t bytes, c10::StreamId stream, CaptureId pool) {
  auto best = memory.blocks.end();
  for (auto block = memory.blocks.begin(); block != memory.blocks.end(); ++block) {
    const Block& one = block->second;
    const bool fits = !one.is_used && one.stream == stream && one.pool == pool && one.bytes >= bytes;
    if (fits && (best == memory.blocks.end() || block->second.bytes < best->second.bytes)) best = block;
  }
  if (best == memory.blocks.end()) best = new_segment(memory, device, bytes, stream, pool);
  if (best->second.bytes > bytes) {
    Block rest = best->second;
    rest.bytes -= bytes;
    memory.blocks.emplace(best->first + bytes, rest);
    best->second.bytes = bytes;
  }
  return best;
}

void free_memory(void* data) {
  const Lock lock;
  const int device = device_of(data);
  Memory& memory = memory_of(device);
  const auto block = memory.blocks.find(reinterpret_cast<std::uintptr_t>(data));
  stats_of(device).allocated -= static_cast<std::int64_t>(block->second.bytes);
  const c10::Stream stream(c10::Stream::UNSAFE, sim::device(device), block->second.stream);
  const Clock known = clock_of(stream);
  Clock recorded;  // Each of those streams has an event now, also behind what it has waited for.
  for (const auto id : block->second.recorded) recorded.join(clock_of(c10::Stream(c10::Stream::UNSAFE, sim::device(device), id)));
  bool told = false;
  accesses().for_each(block->first, block->first + block->second.bytes, [&](const Access& access) {
    if (known.knows(access) || block->second.pool != 0) return;  // Nobody else gets what a graph has.
    if (recorded.knows(access)) {
      block->second.until = recorded;
      return;
    }
    if (options().judge_at_reuse || std::exchange(told, true)) return;
    report("freed early: memory of " + std::string(stream.id() == 0 ? "the default stream" : "stream " + std::to_string(stream.id())) +
           ", which does not know that " + describe(access) + " is over");
  });
  if (!block->second.until) give_back(memory, block);
}

}  // namespace

int device_of(const void* address) {
  const auto a = reinterpret_cast<std::uintptr_t>(address);
  for (int device = 0; device < kDevices; ++device) {
    const auto begin = all_memory()[static_cast<std::size_t>(device)].begin;
    if (begin != 0 && a >= begin && a < begin + kWindow) return device;
  }
  return -1;
}

void* behind(const void* device_address) {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(device_address) + memory_of(device_of(device_address)).behind);
}

Allocation allocation_at(std::uintptr_t address) {
  const int device = device_of(reinterpret_cast<const void*>(address));
  if (device < 0) return {};
  auto& blocks = memory_of(device).blocks;
  auto block = blocks.upper_bound(address);
  if (block == blocks.begin()) return {};
  --block;
  if (!block->second.is_used || address >= block->first + block->second.bytes) return {};
  return {.address = block->first, .number = block->second.number, .pool = block->second.pool};
}

Snapshot snapshot(int device) {
  Snapshot all;
  const Memory& memory = memory_of(device);
  for (const auto& [address, block] : memory.blocks) {
    if (!block.is_used) continue;
    const auto* const bytes = reinterpret_cast<const std::byte*>(address + memory.behind);
    all.emplace(block.number, std::pair(address, std::vector<std::byte>(bytes, bytes + block.bytes)));
  }
  return all;
}

void restore(int device, const Snapshot& before, CaptureId pool) {
  const Memory& memory = memory_of(device);
  for (const auto& [address, block] : memory.blocks) {
    if (block.pool == pool) poison(memory, address, block.bytes);
    const auto was = block.is_used ? before.find(block.number) : before.end();
    if (was != before.end()) std::memcpy(reinterpret_cast<void*>(address + memory.behind), was->second.second.data(), block.bytes);
  }
}

void give_pool_back(int device, CaptureId pool) {
  for (auto& [address, block] : memory_of(device).blocks) {
    if (block.pool == pool) block.pool = 0;
  }
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kType) return tensor;
  const at::AutoDispatchBelowADInplaceOrView below;
  void* const data = tensor.numel() > 0 ? behind(tensor.const_data_ptr()) : nullptr;
  auto alias = at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

at::DataPtr Allocator::allocate(std::size_t bytes) { return allocate_on(current_device(), bytes); }

at::DataPtr Allocator::allocate_on(int device, std::size_t bytes) {
  if (bytes == 0) return {nullptr, sim::device(device)};
  const Lock lock;
  Memory& memory = memory_of(device);
  const auto stream = current_stream(device);
  give_back_what_is_over(memory, device);
  allocate_beside_captures(stream);
  const auto block = free_block(memory, device, rounded(bytes, kBlock), stream.id(), capture_of(stream));
  block->second.is_used = true;
  block->second.number = ++memory.allocations;
  // Whoever uses it on another stream has to be behind this.
  const Range range{.begin = block->first, .end = block->first + block->second.bytes, .write = true};
  launch(stream, "allocate", std::span(&range, 1), Counts::kNot);
  Stats& stats = stats_of(device);
  ++stats.allocations;
  stats.allocated += static_cast<std::int64_t>(block->second.bytes);
  stats.peak = std::max(stats.peak, stats.allocated);
  void* const data = reinterpret_cast<void*>(block->first);
  return {data, data, &free_memory, sim::device(device)};
}

at::DeleterFnPtr Allocator::raw_deleter() const { return &free_memory; }

void Allocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  const auto source = reinterpret_cast<std::uintptr_t>(from);
  const auto target = reinterpret_cast<std::uintptr_t>(to);
  const std::array<Range, 2> ranges = {{{source, source + bytes, false}, {target, target + bytes, true}}};
  launch(current_stream(device_of(to)), "copy of memory", ranges);
  std::memcpy(behind(to), behind(from), bytes);
}

void Allocator::recordStream(const c10::DataPtr& memory, c10::Stream stream) {
  const Lock lock;
  const int device = device_of(memory.get());
  if (device < 0) return;
  auto& blocks = memory_of(device).blocks;
  auto block = blocks.upper_bound(reinterpret_cast<std::uintptr_t>(memory.get()));
  if (block == blocks.begin()) return;
  --block;
  if (stream.id() != block->second.stream) block->second.recorded.insert(stream.id());
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex device) {
  const Stats now = sim::stats(device);
  c10::CachingDeviceAllocator::DeviceStats stats;
  for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
    (*bytes)[0].current = now.allocated;
    (*bytes)[0].peak = now.peak;
  }
  stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = now.reserved;
  return stats;
}

void Allocator::resetPeakStats(c10::DeviceIndex device) {
  const Lock lock;
  stats_of(device).peak = stats_of(device).allocated;
}

Allocator& allocator() {
  static auto* const made = new Allocator;
  return *made;
}

}  // namespace sim
