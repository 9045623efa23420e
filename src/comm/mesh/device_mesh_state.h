#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/collectives/group.h"
#include "comm/communicator.h"
#include "fsdp/device_mesh.h"

namespace fsdp {

/// This rank's row along one dimension. Sub-meshes share it.
struct MeshRow {
  std::shared_ptr<comm::Communicator> communicator;
  /// Makes another communicator of the row, or of so many neighbours in it; null if none can be made.
  std::function<std::shared_ptr<comm::Communicator>(std::int64_t neighbours)> make;
  std::map<std::int64_t, std::shared_ptr<comm::Communicator>> second =
      {};  ///< The communicators that second_communicator() has made, by its argument.
};

/// Communicators of the ranks along several rows at once, for data in host memory. Sub-meshes share it.
struct JoinedRows {
  /// Makes one of these ranks of the world. `name` is equal on them, and differs between all that are made.
  std::function<std::shared_ptr<comm::Communicator>(const comm::Row& ranks, const std::string& name)> make;
  /// Makes one that does not look for shared memory.
  std::function<std::shared_ptr<comm::Communicator>(const comm::Row& ranks, const std::string& name)> make_for_messages;
  /// The communicators that comm::joined_row() has made, by their rows.
  std::map<std::vector<std::shared_ptr<comm::Communicator>>, std::shared_ptr<comm::Communicator>> made = {};
};

/// The state that copies of a mesh share.
struct DeviceMesh::State {
  c10::Device device = c10::kCPU;
  std::optional<c10::DeviceType> stands_for = {};  ///< The devices of a planned mesh; none: `device` is what it is.
  std::int64_t rank = 0;                           ///< The global rank.
  std::int64_t world_size = 1;                     ///< The number of all ranks, those of the mesh and others.
  std::vector<MeshDim> dims;
  std::vector<std::int64_t> coordinates;       ///< This rank's coordinates, one per dimension.
  std::vector<std::shared_ptr<MeshRow>> rows;  ///< This rank's rows, one per dimension.
  std::shared_ptr<JoinedRows> joined = {};     ///< Null on all ranks if none can be made.
};

}  // namespace fsdp
