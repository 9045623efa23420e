#include "base/stream_capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#ifdef USE_C10D_NCCL
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "fsdp/error.h"

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

bool is_capturing_on(c10::Device device) {
  return !device.is_cpu() && is_capturing(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void refuse_in_capture(c10::Device device, const char* what, const char* instead) {
  if (!is_capturing_on(device)) return;
  throw Error(std::string(what) + " in a step that is captured as a graph: the host would need what the device computes; " + instead);
}

}  // namespace fsdp
