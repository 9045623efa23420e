#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace fsdp {

/// Calls `fn` with ranges that together are [0, count), on torch's intra-op threads (at::set_num_threads), of which the caller is one. At
/// most count / grain threads take part. A call from within a range of another parallel_for uses the calling thread alone. The ranges run
/// at once and in any order. If `fn` throws, one of the exceptions is thrown here, after all ranges have ended.
///
/// at::parallel_for can't be used here: it is a template, and in code that is compiled without OpenMP, such as this library, it calls `fn`
/// once with the whole range.
void parallel_for(std::int64_t count, std::int64_t grain, c10::function_ref<void(std::int64_t begin, std::int64_t end)> fn);

}  // namespace fsdp
