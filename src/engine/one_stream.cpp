#include "engine/one_stream.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "base/stream_capture.h"

namespace fsdp::engine {
namespace {

/// What comes on `second` runs behind what is on `first`.
void order(const c10::Stream& first, const c10::Stream& second) {
  c10::Event until_here(first.device_type());
  until_here.record(first);
  until_here.block(second);
}

}  // namespace

c10::StreamId OneStream::current_id() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).id(); }

void OneStream::follow() {
  if (device_.is_cpu()) return;
  const auto current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  // A captured graph can depend only on work that it records itself, so code that captures one waits for all other work first, as
  // torch.cuda.graph does.
  if (followed_ && *followed_ != current && is_capturing(*followed_) == is_capturing(current)) {
    order(*followed_, current);
  }
  if (followed_ && *followed_ != current && std::find(left_.begin(), left_.end(), *followed_) == left_.end()) left_.push_back(*followed_);
  followed_ = current;
  followed_id_.store(current.id(), std::memory_order_release);
}

void OneStream::rejoin() noexcept {
  try {
    for (const auto& left : left_) {
      if (left != *followed_ && is_capturing(left) == is_capturing(*followed_)) order(*followed_, left);
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch) The device has failed, and an exception that says so is on its way.
  }
}

}  // namespace fsdp::engine
