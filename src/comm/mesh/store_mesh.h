#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "fsdp/device_mesh.h"

namespace fsdp::comm {

/// A mesh of ranks that have met already, in a process group of torch.distributed for example.
struct StoreMesh {
  c10::intrusive_ptr<c10d::Store> store;  ///< Which all ranks share; it must serve until the mesh is made.
  std::string prefix;                     ///< Keeps the keys of this mesh apart: the same on its ranks, and no other mesh's.
  std::int64_t rank = 0;                  ///< Global.
  std::int64_t world_size = 1;
  std::vector<std::string> dims;                ///< Outermost first.
  std::vector<std::vector<std::int64_t>> rows;  ///< Per dimension: the global ranks of this rank's row.
  c10::Device device = c10::kCPU;
  MeshOptions options = {};
  /// Who moves the tensors along a dimension (NCCL's groups of torch.distributed), by the backend's own collectives; only small messages
  /// then have groups that are made here. `neighbours`: 0 for the row's group; else a new group of so many neighbours in it is asked for.
  /// Empty: all groups are made here. A row of one is asked for with FSDP_SINGLE_RANK_COLLECTIVES=1 alone; without, it moves nothing.
  std::function<c10::intrusive_ptr<c10d::Backend>(std::size_t dim, std::int64_t neighbours)> backend_of = {};
};

/// Connects the ranks of each row with groups of their own. Collective over the mesh; blocks. Throws CommError if the ranks can't meet.
DeviceMesh make_store_mesh(const StoreMesh& options);

}  // namespace fsdp::comm
