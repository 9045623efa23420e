#include "base/parallel_for.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

#include <atomic>

namespace fsdp {
namespace {

// Orders the ranges after what the caller did before them, and before what it does next. Torch's threads do so, too, where ThreadSanitizer
// does not see it.
std::atomic<std::uint64_t> order_of_ranges = 0;

}  // namespace

void parallel_for(std::int64_t count, std::int64_t grain, c10::function_ref<void(std::int64_t begin, std::int64_t end)> fn) {
  if (count <= 0) return;
  if (count <= grain || at::get_num_threads() == 1) return fn(0, count);
  // TensorIterator's loop is parallel in torch's own library. It passes addresses: here of elements that are never read or written.
  char* const first = reinterpret_cast<char*>(std::uintptr_t{1} << 12);
  const at::Tensor numbers = at::from_blob(first, {count}, at::kByte);
  auto iterator =
      at::TensorIteratorConfig().set_check_mem_overlap(false).check_all_same_dtype(false).resize_outputs(false).add_output(numbers).build();
  order_of_ranges.fetch_add(1, std::memory_order_release);
  iterator.for_each(
      [&](char** data, const std::int64_t*, std::int64_t size, std::int64_t) {
        order_of_ranges.load(std::memory_order_acquire);
        const std::int64_t begin = data[0] - first;
        fn(begin, begin + size);
        order_of_ranges.fetch_add(1, std::memory_order_release);
      },
      grain);
  order_of_ranges.load(std::memory_order_acquire);
}

}  // namespace fsdp
