#include <algorithm>

#include "cuda/launch.h"

namespace fsdp::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 2048;  // of a part

/// A warp is a team, whose neighbouring threads read and write neighbouring elements.
struct Warp {
  int lane;

  template <typename Fn>
  FSDP_ELEMENT void for_each(std::int64_t count, const Fn& fn) const {
    for (std::int64_t i = lane; i < count; i += kLanes) fn(i);
#if defined(__CUDA_ARCH__)
    __syncwarp();
#endif
  }
  FSDP_ELEMENT std::uint32_t largest(const float* values, std::int64_t count) const {
    std::uint32_t most = 0;
    for (std::int64_t i = lane; i < count; i += kLanes) {
      const std::uint32_t magnitude = bits_of(values[i]) & 0x7fffffffu;
      most = magnitude > most ? magnitude : most;
    }
#if defined(__CUDA_ARCH__)
    most = __reduce_max_sync(0xffffffffu, most);
#endif
    return most;
  }
  FSDP_ELEMENT void transform(float* values, std::int64_t count) const { transform_in_pairs(*this, values, count); }
};

template <bool kEncodes>
__global__ void __launch_bounds__(kThreads) convert_parts(const __grid_constant__ DeviceRounding rounding) {
  constexpr std::int64_t kTeams = kThreads / kLanes;
  const Warp warp{static_cast<int>(threadIdx.x) % kLanes};
  const std::int64_t team = blockIdx.x * kTeams + threadIdx.x / kLanes;
  convert_part<kEncodes>(warp, rounding.format, rounding.parts[blockIdx.y], team, gridDim.x * kTeams);
}

template <bool kEncodes>
cudaError_t convert(const DeviceRounding& rounding, cudaStream_t stream) {
  std::int64_t most = 0;
  for (int number = 0; number < rounding.count; ++number) most = std::max(most, blocks_of(rounding.format, rounding.parts[number]));
  constexpr std::int64_t kTeams = kThreads / kLanes;
  const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>((most + kTeams - 1) / kTeams, 1, kMostBlocks));
  convert_parts<kEncodes><<<dim3(blocks, static_cast<unsigned>(rounding.count)), kThreads, 0, stream>>>(rounding);
  return cudaGetLastError();
}

}  // namespace

cudaError_t round(const DeviceRounding& rounding, cudaStream_t stream) { return convert<true>(rounding, stream); }
cudaError_t unround(const DeviceRounding& rounding, cudaStream_t stream) { return convert<false>(rounding, stream); }

}  // namespace fsdp::cuda
