#include <algorithm>

#include "cuda/launch.h"

namespace fsdp::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kMostBlocks = 4096;

unsigned grid_for(std::int64_t threads) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1, kMostBlocks));
}
__device__ std::int64_t thread() { return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ std::int64_t threads() { return static_cast<std::int64_t>(gridDim.x) * kThreads; }

template <typename T>
__global__ void __launch_bounds__(kThreads) encode_float8(const __grid_constant__ BlockedPieces pieces) {
  encode_blocks<T>(pieces, thread(), threads());
}
template <typename T>
__global__ void __launch_bounds__(kThreads) decode_float8(const __grid_constant__ BlockedPieces pieces) {
  decode_blocks<T>(pieces, thread(), threads());
}

}  // namespace

cudaError_t encode(const BlockedPieces& pieces, cudaStream_t stream) {
  with_real_type(pieces.dtype,
                 [&](auto type) { encode_float8<decltype(type)><<<grid_for(pieces.blocks()), kThreads, 0, stream>>>(pieces); });
  return cudaGetLastError();
}

cudaError_t decode(const BlockedPieces& pieces, cudaStream_t stream) {
  const auto grid = grid_for(pieces.pieces * pieces.numel / kPack);
  with_real_type(pieces.dtype, [&](auto type) { decode_float8<decltype(type)><<<grid, kThreads, 0, stream>>>(pieces); });
  return cudaGetLastError();
}

}  // namespace fsdp::cuda
