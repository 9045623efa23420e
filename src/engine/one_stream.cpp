#include "engine/one_stream.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/stream_capture.h"

namespace fsdp::engine {

c10::StreamId OneStream::current_id() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).id(); }

void OneStream::follow() {
  if (device_.is_cpu()) return;
  const auto current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  // A captured graph can depend only on work that it records itself, so code that captures one waits for all other work first, as
  // torch.cuda.graph does.
  if (followed_ && *followed_ != current && is_capturing(*followed_) == is_capturing(current)) {
    // An event after all of the model's work on the stream that it leaves.
    c10::Event until_here(device_.type());
    until_here.record(*followed_);
    until_here.block(current);
  }
  followed_ = current;
  followed_id_.store(current.id(), std::memory_order_release);
}

}  // namespace fsdp::engine
