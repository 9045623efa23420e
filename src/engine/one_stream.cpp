#include "engine/one_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "base/order_streams.h"
#include "base/stream_capture.h"

namespace fsdp::engine {

c10::StreamId OneStream::current_id() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).id(); }

void OneStream::follow() {
  if (device_.is_cpu()) return;
  const auto current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  // A captured graph can depend only on work that it records itself, so code that captures one waits for all other work first, as
  // torch.cuda.graph does.
  if (followed_ && *followed_ != current && is_capturing(*followed_) == is_capturing(current)) {
    order_streams(*followed_, current);
  }
  if (followed_ && *followed_ != current && std::find(left_.begin(), left_.end(), *followed_) == left_.end()) left_.push_back(*followed_);
  followed_ = current;
  followed_id_.store(current.id(), std::memory_order_release);
}

void OneStream::rejoin() noexcept {
  try {
    for (const auto& left : left_) {
      if (left != *followed_ && is_capturing(left) == is_capturing(*followed_)) order_streams(*followed_, left);
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch) The device has failed, and an exception that says so is on its way.
  }
}

}  // namespace fsdp::engine
