#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/device_mesh.h"

namespace fsdp {

/// This rank's row along one dimension. Sub-meshes share it.
struct MeshRow {
  std::shared_ptr<comm::Communicator> communicator;
  /// Makes another communicator of the row, or of so many neighbours in it; null where none can be made.
  std::function<std::shared_ptr<comm::Communicator>(std::int64_t neighbours)> make;
  std::map<std::int64_t, std::shared_ptr<comm::Communicator>> second = {};  ///< As second_communicator() has made them: by its argument.
};

/// What the copies of a mesh share.
struct DeviceMesh::State {
  c10::Device device = c10::kCPU;
  std::int64_t rank = 0;  ///< Global.
  std::vector<MeshDim> dims;
  std::vector<std::int64_t> coordinates;       ///< This rank's, one per dimension.
  std::vector<std::shared_ptr<MeshRow>> rows;  ///< The same.
};

}  // namespace fsdp
