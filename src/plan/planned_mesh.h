#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/device_mesh.h"

namespace fsdp::planning {

/// Replaces real meshes by planned ones of the same sizes, as seen by the first rank, which has the most. Their rows move bytes as the real
/// rows do.
class PlannedMeshes {
 public:
  /// The arguments of engine::communicators_of for the units on these meshes.
  PlannedMeshes(bool separate_reduce_group, std::int64_t neighbours)
      : separate_reduce_group_(separate_reduce_group), neighbours_(neighbours) {}

  /// The planned mesh of a real one, or of a part of it. Always the same one for the same rows. Collective over the mesh if a communicator
  /// that its units will need has to be made.
  DeviceMesh of(const DeviceMesh& mesh);

 private:
  using Rows = std::vector<std::shared_ptr<comm::Communicator>>;
  bool separate_reduce_group_;
  std::int64_t neighbours_;
  std::vector<std::pair<Rows, DeviceMesh>> known_;
};

/// Planned meshes with 2 to 64 times as many ranks in the dimension that is sharded over.
std::vector<DeviceMesh> larger_meshes(const DeviceMesh& mesh);

}  // namespace fsdp::planning
