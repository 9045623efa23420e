#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/device_mesh.h"

namespace fsdp::comm {

/// One communicator of all ranks that these rows lead to, so that each of them can send straight to each other one. `rows`: this rank's, of
/// one mesh or of several, the outermost first; a rank's position in the result varies fastest along the last one. It is made at the first
/// call with these rows, with connections of its own, and kept with `mesh` and its sub-meshes. Null on all ranks if `mesh` can't make one:
/// if its ranks have devices, or do not communicate by the engine's connections. Collective over the ranks. Throws CommError.
std::shared_ptr<Communicator> joined_row(const DeviceMesh& mesh, const std::vector<std::shared_ptr<Communicator>>& rows);

/// The communicators that were made with `mesh`.
std::vector<Communicator*> joined_rows_of(const DeviceMesh& mesh);

/// A sender and a receiver, by their positions among the ranks to which rows lead.
using RankPair = std::pair<std::int64_t, std::int64_t>;
/// Connects pairs of these ranks, for data in host memory, on meshes of any device. `pairs`: in ascending order, the same on all ranks.
/// Returns one communicator for each pair that has this rank, in their order; its rank 0 is the sender. Collective over the ranks. Throws
/// Error on all ranks if `mesh` does not communicate by the engine's connections; CommError if the rendezvous fails.
std::vector<std::shared_ptr<Communicator>> connect_pairs(const DeviceMesh& mesh, const std::vector<std::shared_ptr<Communicator>>& rows,
                                                         const std::vector<RankPair>& pairs);

}  // namespace fsdp::comm
