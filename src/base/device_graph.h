#pragma once

#include <c10/core/Device.h>

#include <memory>

namespace fsdp {

/// Work of a device that is recorded once and launched on streams any number of times: a CUDA graph.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  /// From now on, records the work on the current stream, and on streams that wait for it, instead of running it.
  virtual void begin_capture() = 0;
  virtual void end_capture() = 0;
  /// On the current stream.
  virtual void replay() = 0;
};

/// Null if devices of this type have no graphs, or this build does not support them: torch has an interface for any device from 2.13 on,
/// and builds with FSDP_CUDA support CUDA's.
std::unique_ptr<DeviceGraph> make_device_graph(c10::DeviceType type);

}  // namespace fsdp
