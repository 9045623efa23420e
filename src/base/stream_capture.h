#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace fsdp {

/// Whether a graph is being captured on the stream: work that is put on the stream now is then recorded instead of run. Torch reports this
/// for any device from 2.13 on. With older versions, only builds with FSDP_CUDA know it, for CUDA's streams. Returns false if it is not
/// known.
bool is_capturing(const c10::Stream& stream);
/// Whether a graph is being captured on the device's current stream; false for a CPU.
bool is_capturing_on(c10::Device device);

/// Throws Error if the device's current stream is captured: `what` needs a result of the device on the host. `instead` is the suggestion in
/// the error.
void refuse_in_capture(c10::Device device, const char* what, const char* instead);

}  // namespace fsdp
