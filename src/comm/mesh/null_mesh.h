#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "comm/traffic.h"
#include "fsdp/device_mesh.h"

namespace fsdp::comm {

/// A mesh without peers, as seen by one of its ranks: see NullCommunicator.
struct NullMesh {
  std::vector<MeshDim> dims;
  std::int64_t rank = 0;
  c10::Device device = c10::kCPU;
  std::optional<c10::DeviceType> stands_for = {};  ///< See DeviceMesh::device_type.
  /// Returns how a row of `size` ranks moves bytes, whose global ranks are `stride` apart. Empty: by messages.
  std::function<Traffic(int size, std::int64_t stride)> traffic = {};
};

/// Throws Error if a size is missing, a name is empty or repeated, or there is no such rank.
DeviceMesh make_null_mesh(NullMesh options);

}  // namespace fsdp::comm
