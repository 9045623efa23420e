#include <cstdint>
#include <vector>

#include "comm/device_sums.h"
#include "memory.h"
#include "streams.h"

// libfsdp's own kernels: each is one, and does what its threads would do on a GPU.
namespace sim {
namespace {

/// So many threads, whatever there is to do: some have more than one element, or none.
constexpr int kThreads = 3;

template <typename T>
T* pointer_behind(T* address) {
  return address == nullptr ? nullptr : static_cast<T*>(behind(address));
}

void add_range(std::vector<Range>& ranges, const void* address, std::int64_t bytes, bool write) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  if (bytes > 0) ranges.push_back({.begin = begin, .end = begin + static_cast<std::uintptr_t>(bytes), .write = write});
}

template <typename Source, typename Out>
void sum(fsdp::comm::DeviceSum given, c10::Stream stream) {
  std::vector<Range> ranges;
  for (int number = 0; number < given.count; ++number) {
    auto& part = given.parts[number];
    const auto bytes = part.numel * static_cast<std::int64_t>(sizeof(Out));
    for (int k = 0; k < part.count; ++k) {
      add_range(ranges, fsdp::comm::piece_of<Source>(part, k), part.numel * static_cast<std::int64_t>(sizeof(Source)), /*write=*/false);
    }
    if (given.accumulate) add_range(ranges, part.out, bytes, /*write=*/false);
    add_range(ranges, part.out, bytes, /*write=*/true);
    part.first = pointer_behind(part.first);
    part.apart_piece = pointer_behind(part.apart_piece);
    part.out = pointer_behind(part.out);
  }
  launch(stream, "fsdp::sum", ranges);
  for (int number = 0; number < given.count; ++number) {
    for (int thread = 0; thread < kThreads; ++thread) fsdp::comm::sum_part<Source, Out>(given, number, thread, kThreads);
  }
}

void launch_sum(const fsdp::comm::DeviceSum& given, const c10::Stream& stream) {
  fsdp::with_real_type(given.source, [&](auto source) {
    fsdp::with_real_type(given.out, [&](auto out) { sum<decltype(source), decltype(out)>(given, stream); });
  });
}

[[maybe_unused]] const bool kRegistered = [] {
  fsdp::comm::device_sums().set(kType, &launch_sum);
  return true;
}();

}  // namespace
}  // namespace sim
