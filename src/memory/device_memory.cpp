#include "memory/device_memory.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <memory>
#include <string>
#include <utility>

#include "memory/pinned_memory.h"
#include "memory/shared_heap.h"

namespace fsdp::memory {
namespace {

/// Smaller blocks are not mapped, because rounding them up to whole pages would waste too much.
constexpr std::int64_t kMappedBytes = std::int64_t{1} << 20;

/// The same limit for memory that peers read directly; smaller blocks are copied for them.
constexpr std::int64_t kSharedBytes = std::int64_t{64} << 10;

struct Mapping {
  void* data;
  std::size_t bytes;
  bool reported;  ///< Whether it was reported to torch's memory profiler.
};

void report(void* data, std::int64_t change) {
  c10::reportMemoryUsageToProfiler(data, change, /*total_allocated=*/0, /*total_reserved=*/0, at::kCPU);
}

void unmap(void* context) {
  const std::unique_ptr<Mapping> mapping(static_cast<Mapping*>(context));
  if (mapping->reported) report(mapping->data, -static_cast<std::int64_t>(mapping->bytes));
  munmap(mapping->data, mapping->bytes);
}

c10::DataPtr map(c10::Device device, std::size_t bytes, bool reported = false) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    C10_THROW_ERROR(OutOfMemoryError, "libfsdp could not map " + std::to_string(bytes) + " bytes of memory");
  }
  madvise(data, bytes, MADV_HUGEPAGE);  // The call may fail: the memory also works without huge pages.
  if (reported) report(data, static_cast<std::int64_t>(bytes));
  return {data, new Mapping{data, bytes, reported}, &unmap, device};
}

bool is_mapped(c10::Device device, std::int64_t bytes) { return device.is_cpu() && bytes >= kMappedBytes; }

/// Returns a CPU tensor over memory that is fresh from the system, and therefore zero.
at::Tensor over(c10::DataPtr memory, std::int64_t bytes) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<std::size_t>(bytes),
                                                       std::move(memory), nullptr, /*resizable=*/false);
  return at::empty({0}, at::TensorOptions().dtype(at::kByte)).set_(c10::Storage(std::move(storage)), 0, {bytes}, {1});
}

/// A block without bytes. It has an address nevertheless, which distinguishes it from no block.
c10::DataPtr without_bytes(c10::Device device) {
  static char somewhere = 0;
  return {&somewhere, device};
}

}  // namespace

c10::DataPtr allocate(c10::Device device, std::int64_t bytes) {
  if (device.is_meta()) return without_bytes(device);
  if (is_mapped(device, bytes)) return map(device, static_cast<std::size_t>(bytes));
  const c10::DeviceGuard guard(device);
  return c10::GetAllocator(device.type())->allocate(static_cast<std::size_t>(bytes));
}

c10::DataPtr allocate_shareable(c10::Device device, std::int64_t bytes) {
  if (device.is_cpu() && bytes >= kSharedBytes) {
    if (const auto heap = SharedHeap::opened()) {
      if (auto block = heap->allocate(bytes)) return block;
    }
  }
  return allocate(device, bytes);
}

c10::DataPtr allocate_as_torch(c10::Device device, std::int64_t bytes) {
  return is_mapped(device, bytes) ? map(device, static_cast<std::size_t>(bytes), /*reported=*/true) : allocate(device, bytes);
}

at::Tensor zeros(c10::Device device, std::int64_t bytes) {
  if (!is_mapped(device, bytes)) return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  return over(map(device, static_cast<std::size_t>(bytes)), bytes);
}

void synchronize(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) return;
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

c10::DataPtr allocate_host(c10::Device device, std::int64_t bytes, HostMemoryKind kind) {
  if (device.is_cpu() || device.is_meta() || kind == HostMemoryKind::kPageable) return allocate(host_of(device), bytes);
  if (bytes >= kMappedBytes) {
    if (auto block = allocate_pinned(device, bytes)) return block;
  }
  return at::globalContext().getPinnedMemoryAllocator(device.type())->allocate(static_cast<std::size_t>(bytes));
}

at::Tensor host_zeros(c10::Device device, std::int64_t bytes, HostMemoryKind kind) {
  if (device.is_cpu() || device.is_meta() || kind == HostMemoryKind::kPageable) return zeros(host_of(device), bytes);
  if (bytes >= kMappedBytes) {
    if (auto block = allocate_pinned(device, bytes)) return over(std::move(block), bytes);
  }
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}

}  // namespace fsdp::memory
