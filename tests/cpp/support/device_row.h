#pragma once

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <utility>

#include "collectives.h"
#include "comm/mesh/device_mesh_state.h"
#include "comm/mesh/rendezvous.h"
#include "fsdp/device_mesh.h"
#include "support/temporary_folder.h"

namespace fsdp::testing {

/// A row of all ranks, whose backend is the device's.
struct OfAllRanks {
  OfAllRanks(const TemporaryFolder& folder, int rank, int size)
      : row{.dim = "dp_shard", .rank = rank, .global_ranks = {}, .world_size = size},
        rendezvous(c10::make_intrusive<c10d::FileStore>(folder.path() / "store", size), rank, size, "row", std::chrono::seconds(60)) {
    for (int other = 0; other < size; ++other) row.global_ranks.push_back(other);
    backend = sim::make_collectives(rendezvous.gloo_group(row, "data"));
  }

  comm::Row row;
  comm::Rendezvous rendezvous;
  c10::intrusive_ptr<c10d::Backend> backend;
};

/// A mesh of one dimension, whose ranks communicate by this communicator; rank r has device r.
inline DeviceMesh mesh_over(const std::shared_ptr<comm::Communicator>& communicator) {
  auto state = std::make_shared<DeviceMesh::State>();
  state->device = sim::device(communicator->rank());
  state->rank = communicator->rank();
  state->dims = {{"dp_shard", communicator->size()}};
  state->coordinates = {communicator->rank()};
  state->rows = {std::make_shared<MeshRow>(MeshRow{.communicator = communicator, .make = {}})};
  return DeviceMesh(std::move(state));
}

}  // namespace fsdp::testing
