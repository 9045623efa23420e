#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "comm/collectives/native_communicator.h"
#include "comm/launch/world.h"
#include "comm/mesh/rendezvous.h"

namespace fsdp::testing {

/// Returns a communicator of all ranks over Gloo, which has the same native collectives as NCCL.
inline std::unique_ptr<comm::NativeCommunicator> native_world() {
  const comm::World world = comm::read_world(comm::process_environment);
  comm::Row row{.dim = "dp_shard", .rank = world.rank, .global_ranks = {}, .world_size = world.size};
  for (int rank = 0; rank < world.size; ++rank) row.global_ranks.push_back(rank);
  comm::Rendezvous rendezvous(world, "test", std::chrono::seconds(30));
  auto backend = rendezvous.gloo_group(row, "data");
  auto control = rendezvous.gloo_group(row, "control");
  auto communicator = std::make_unique<comm::NativeCommunicator>(row, std::move(backend), std::move(control));
  communicator->barrier();
  return communicator;
}

}  // namespace fsdp::testing
