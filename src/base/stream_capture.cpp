#include "base/stream_capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#ifdef USE_C10D_NCCL
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace fsdp {
namespace {

template <typename Guard>
concept TellsOfCapture = requires(const Guard& guard, const c10::Stream& stream) {
  guard.isStreamCapturing(stream);
};

template <typename Guard>
bool is_capturing_by(const Guard& guard, const c10::Stream& stream) {
  if constexpr (TellsOfCapture<Guard>) {
    return guard.isStreamCapturing(stream);
  } else {
#ifdef USE_C10D_NCCL
    if (stream.device_type() != c10::DeviceType::CUDA) return false;
    auto status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream), &status));
    return status == cudaStreamCaptureStatusActive;
#else
    return false;
#endif
  }
}

}  // namespace

bool is_capturing(const c10::Stream& stream) { return is_capturing_by(c10::impl::VirtualGuardImpl(stream.device_type()), stream); }

}  // namespace fsdp
