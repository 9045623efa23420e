#pragma once

#include <c10/core/Device.h>

#include <memory>

namespace fsdp {

/// Work of a device that is recorded once and put on streams again and again: a CUDA graph.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  /// Records what comes on the current stream from now on, and on streams that wait for it, in place of running it.
  virtual void begin_capture() = 0;
  virtual void end_capture() = 0;
  /// On the current stream.
  virtual void replay() = 0;
};

/// Null if devices of this type have no graphs, or this build does not know them: torch has an interface for any device from 2.13 on, and
/// builds with FSDP_CUDA know CUDA's.
std::unique_ptr<DeviceGraph> make_device_graph(c10::DeviceType type);

}  // namespace fsdp
