#include <algorithm>

#include "cuda/launch.h"

namespace fsdp::cuda {
namespace {

constexpr int kThreads = static_cast<int>(optim::kBlock);
constexpr std::int64_t kMostBlocks = 1 << 20;

/// A block of threads for a block of elements, or for several, one after the other.
template <typename Value, typename Gradient>
__global__ void __launch_bounds__(kThreads) step_adamw_8bit(const __grid_constant__ optim::DeviceAdamW8bit step) {
  __shared__ int largest[2];
  for (std::int64_t begin = blockIdx.x * optim::kBlock; begin < step.numel; begin += gridDim.x * optim::kBlock) {
    if (threadIdx.x < 2) largest[threadIdx.x] = 0;
    __syncthreads();
    const std::int64_t at = begin + threadIdx.x;
    optim::AdamWElement updated{};
    if (at < step.numel) updated = optim::update_at<Value, Gradient>(step, at);
    const int first = __reduce_max_sync(0xffffffffu, optim::magnitude_bits(updated.first));
    const int second = __reduce_max_sync(0xffffffffu, optim::magnitude_bits(updated.second));
    if (threadIdx.x % warpSize == 0) {
      atomicMax(&largest[0], first);
      atomicMax(&largest[1], second);
    }
    __syncthreads();  // After it, no thread reads the old largest magnitudes in memory.
    if (at < step.numel) {
      optim::encode_at(step.first, at, updated.first, __int_as_float(largest[0]));
      optim::encode_at(step.second, at, updated.second, __int_as_float(largest[1]));
    }
    __syncthreads();
  }
}

/// Calls fn with a value of the C++ type of a dtype that has state of 8 bits.
template <typename Fn>
void with_narrow_type(c10::ScalarType dtype, const Fn& fn) {
  with_real_type(dtype, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), double>) fn(type);
  });
}

}  // namespace

cudaError_t adamw_8bit(const optim::DeviceAdamW8bit& step, cudaStream_t stream) {
  const auto blocks = std::clamp<std::int64_t>((step.numel + optim::kBlock - 1) / optim::kBlock, 1, kMostBlocks);
  with_narrow_type(step.dtype, [&](auto value) {
    with_narrow_type(step.gradient_dtype, [&](auto gradient) {
      step_adamw_8bit<decltype(value), decltype(gradient)><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(step);
    });
  });
  return cudaGetLastError();
}

}  // namespace fsdp::cuda
