#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace fsdp {

/// What is put on `second` from now on runs behind what is on `first`.
inline void order_streams(const c10::Stream& first, const c10::Stream& second) {
  c10::Event until_here(first.device_type());
  until_here.record(first);
  until_here.block(second);
}

}  // namespace fsdp
