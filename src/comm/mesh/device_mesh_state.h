#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/device_mesh.h"

namespace fsdp {

/// This rank's row along one dimension. Sub-meshes share it.
struct MeshRow {
  std::shared_ptr<comm::Communicator> communicator;
  /// Makes another communicator of the row, or of so many neighbours in it; null where none can be made.
  std::function<std::shared_ptr<comm::Communicator>(std::int64_t neighbours)> make;
  std::map<std::int64_t, std::shared_ptr<comm::Communicator>> second =
      {};  ///< The communicators that second_communicator() has made, by its argument.
};

/// What the copies of a mesh share.
struct DeviceMesh::State {
  c10::Device device = c10::kCPU;
  std::optional<c10::DeviceType> stands_for = {};  ///< The devices of a planned mesh; none: `device` is what it is.
  std::int64_t rank = 0;                           ///< The global rank.
  std::vector<MeshDim> dims;
  std::vector<std::int64_t> coordinates;       ///< This rank's coordinates, one per dimension.
  std::vector<std::shared_ptr<MeshRow>> rows;  ///< This rank's rows, one per dimension.
};

}  // namespace fsdp
