#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/device_mesh.h"

namespace fsdp {

/// What the copies of a mesh share. A sub-mesh has a state of its own, with the same communicators.
struct DeviceMesh::State {
  c10::Device device = c10::kCPU;
  std::int64_t rank = 0;  ///< Global.
  std::vector<MeshDim> dims;
  std::vector<std::int64_t> coordinates;                           ///< This rank's, one per dimension.
  std::vector<std::shared_ptr<comm::Communicator>> communicators;  ///< This rank's rows, one per dimension.
  /// Makes another communicator of the row along a dimension, or of so many neighbours in it. One per dimension.
  std::vector<std::function<std::shared_ptr<comm::Communicator>(std::int64_t neighbours)>> make_communicator;
};

}  // namespace fsdp
