#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace fsdp {

/// Calls `fn` with ranges that together are [0, count), on torch's intra-op threads (at::set_num_threads), of which the caller is one. No
/// more threads take part than there are `grain`s in `count`, and within another range, none but the caller. The ranges run at once and in
/// any order. If `fn` throws, one of the exceptions is thrown here, after all ranges have ended.
///
/// at::parallel_for is a template that calls `fn` once for all in code that is compiled without OpenMP, as this library is.
void parallel_for(std::int64_t count, std::int64_t grain, c10::function_ref<void(std::int64_t begin, std::int64_t end)> fn);

}  // namespace fsdp
