#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace fsdp {

/// Work that is put on `second` from now on runs after the work on `first`.
inline void order_streams(const c10::Stream& first, const c10::Stream& second) {
  c10::Event until_here(first.device_type());
  until_here.record(first);
  until_here.block(second);
}

}  // namespace fsdp
