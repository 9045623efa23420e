#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace fsdp {

/// Whether a graph is being captured on the stream: work that is put on the stream now is then recorded instead of run. Torch tells this
/// for any device from 2.13 on. With older versions, only builds with FSDP_CUDA can tell, for CUDA's streams. Returns false where it cannot
/// be told.
bool is_capturing(const c10::Stream& stream);
/// The same of the device's current stream; false for a CPU.
bool is_capturing_on(c10::Device device);

/// Throws Error where the device's current stream is captured: `what` needs on the host what the device has computed. `instead` says what
/// to do about it.
void refuse_in_capture(c10::Device device, const char* what, const char* instead);

}  // namespace fsdp
