#pragma once

#include <c10/core/Stream.h>

namespace fsdp {

/// Whether what is put on the stream now is recorded, to be replayed later as a graph, in place of being run. Torch tells so of any device
/// from 2.13 on; before, only builds with FSDP_CUDA know, of CUDA's streams. False where nobody knows.
bool is_capturing(const c10::Stream& stream);

}  // namespace fsdp
