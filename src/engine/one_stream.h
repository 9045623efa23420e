#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <optional>
#include <vector>

namespace fsdp::engine {

/// [One stream at a time] A unit's gather is ordered on the stream that waited for it, and its memory is reused in the order of that
/// stream. So all work on a model follows one stream of its device. Work on another stream is ordered behind all earlier work, and from
/// then on the engine follows that stream. Two streams can use a model in turns; they do not overlap. If only one of the two is being
/// captured as a graph, there is nothing to order, because work of the graph runs when it is replayed.
///
/// On the CPU there are no streams, and all of this does nothing.
class OneStream {
 public:
  explicit OneStream(c10::Device device) : device_(device) {}

  /// True if the current stream of the device is the one that is followed. Any thread may call it.
  bool is_current() const { return device_.is_cpu() || current_id() == followed_id_.load(std::memory_order_acquire); }

  /// Orders the current stream behind the followed one, if they differ, and follows it. The engine serializes calls.
  void follow();
  /// Orders all streams that were followed before behind the followed one, so that memory which was allocated for them can be freed.
  void rejoin() noexcept;

 private:
  c10::StreamId current_id() const;

  c10::Device device_;
  std::optional<c10::Stream> followed_;
  std::vector<c10::Stream> left_;                // each once
  std::atomic<c10::StreamId> followed_id_ = -1;  // of `followed_`; -1: none is followed, which is never a stream's
};

}  // namespace fsdp::engine
