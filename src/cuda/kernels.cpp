#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/launch.h"

// Libfsdp's own kernels, for tensors on CUDA.
namespace fsdp::cuda {
namespace {

template <auto kKernel, typename Given>
void launch(const Given& given, const c10::Stream& stream) {
  C10_CUDA_CHECK(kKernel(given, c10::cuda::CUDAStream(stream).stream()));
}

[[maybe_unused]] const bool kRegistered = [] {
  constexpr auto kType = c10::DeviceType::CUDA;
  comm::device_sums().set(kType, &launch<&sum, comm::DeviceSum>);
  device_encoders().set(kType, &launch<&encode, BlockedPieces>);
  device_decoders().set(kType, &launch<&decode, BlockedPieces>);
  device_rounders().set(kType, &launch<&round, DeviceRounding>);
  device_unrounders().set(kType, &launch<&unround, DeviceRounding>);
  optim::device_adamw_8bit().set(kType, &launch<&adamw_8bit, optim::DeviceAdamW8bit>);
  return true;
}();

}  // namespace
}  // namespace fsdp::cuda
