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

/// Options for a mesh of ranks that are connected already, for example by a process group of torch.distributed.
struct StoreMesh {
  c10::intrusive_ptr<c10d::Store> store;  ///< A store that all ranks share, for as long as the mesh lives.
  std::string prefix;     ///< The prefix of this mesh's keys in the store: the same on its ranks, and different for each mesh.
  std::int64_t rank = 0;  ///< The global rank.
  std::int64_t world_size = 1;
  std::vector<std::string> dims;                ///< The names of the dimensions, outermost first.
  std::vector<std::vector<std::int64_t>> rows;  ///< For each dimension, the global ranks of this rank's row.
  c10::Device device = c10::kCPU;
  MeshOptions options = {};
  /// Returns the backend whose collectives move tensors along a dimension (of a group of torch.distributed with NCCL). Only the groups for
  /// small messages are then made here. `neighbours` is 0 for the row's group; otherwise the function makes a new group of this many
  /// neighbours in the row. If it is empty, all groups are made here. It is called for a row of one rank only if
  /// FSDP_SINGLE_RANK_COLLECTIVES=1 is set; otherwise such a row moves nothing.
  std::function<c10::intrusive_ptr<c10d::Backend>(std::size_t dim, std::int64_t neighbours)> backend_of = {};
};

/// Connects the ranks of each row with groups of their own. Collective over the mesh; blocks. Throws CommError if the rendezvous fails.
DeviceMesh make_store_mesh(const StoreMesh& options);

}  // namespace fsdp::comm
