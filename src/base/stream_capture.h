#pragma once

#include <c10/core/Stream.h>

namespace fsdp {

/// Whether a graph is being captured on the stream: work that is put on the stream now is then recorded instead of run. Torch tells this
/// for any device from 2.13 on. With older versions, only builds with FSDP_CUDA can tell, for CUDA's streams. Returns false where it cannot
/// be told.
bool is_capturing(const c10::Stream& stream);

}  // namespace fsdp
