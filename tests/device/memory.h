#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "capture.h"

namespace sim {

// Each device has two windows of addresses. Tensors have addresses of the first one, which the host cannot touch; kernels work on the
// second.

/// Of which device an address is; -1: of none.
int device_of(const void* address);
/// Where kernels find what lies at a device's address.
void* behind(const void* device_address);
/// The tensor as kernels of the CPU see it: the same bytes. A tensor of the CPU is its own.
at::Tensor on_cpu(const at::Tensor& tensor);

/// Where the block begins in which an address lies, which allocation it is of, and which graph's pool it is of (0: none's). Zeros if none
/// is used there.
struct Allocation {
  std::uintptr_t address = 0;
  std::uint64_t number = 0;
  CaptureId pool = 0;
};
Allocation allocation_at(std::uintptr_t address);

/// What is in the memory that is used now, by the numbers of allocations.
using Snapshot = std::map<std::uint64_t, std::pair<std::uintptr_t, std::vector<std::byte>>>;
Snapshot snapshot(int device);
/// What is still allocated is as it was again, and what the graph's pool has is without values.
void restore(int device, const Snapshot& before, CaptureId pool);
/// The graph has gone: its memory serves all, what is used after it is freed.
void give_pool_back(int device, CaptureId pool);

/// A caching allocator by the rules of CUDA's. A block belongs to the current stream of its allocation, which may use it again as soon as
/// it is freed. So when it is freed, all accesses must be known to that stream or the freeing thread, or to streams that recordStream()
/// has named, whose end the block then waits for. Memory has bytes of 0xFF when it is allocated and after it is freed. What a captured
/// stream allocates is of its graph's pool, and stays there.
class Allocator : public c10::DeviceAllocator {
 public:
  at::DataPtr allocate(std::size_t bytes) override;
  at::DataPtr allocate_on(int device, std::size_t bytes);
  at::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override;
};
Allocator& allocator();

}  // namespace sim
