#include <algorithm>

#include "cuda/launch.h"

namespace fsdp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 2048;  // of a part: enough for every GPU, and each thread then has more to do

template <typename Source, typename Out>
__global__ void __launch_bounds__(kThreads) sum_parts(const __grid_constant__ comm::DeviceSum sum) {
  const auto thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  comm::sum_part<Source, Out>(sum, static_cast<int>(blockIdx.y), thread, static_cast<std::int64_t>(gridDim.x) * kThreads);
}

}  // namespace

cudaError_t sum(const comm::DeviceSum& sum, cudaStream_t stream) {
  std::int64_t most = 0;
  for (int number = 0; number < sum.count; ++number) most = std::max(most, sum.parts[number].numel);
  constexpr std::int64_t kOfBlock = kThreads * kPack;
  const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>((most + kOfBlock - 1) / kOfBlock, 1, kMostBlocks));
  const dim3 grid(blocks, static_cast<unsigned>(sum.count));
  with_real_type(sum.source, [&](auto source) {
    with_real_type(sum.out, [&](auto out) { sum_parts<decltype(source), decltype(out)><<<grid, kThreads, 0, stream>>>(sum); });
  });
  return cudaGetLastError();
}

}  // namespace fsdp::cuda
