#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "export/weight_entry.h"
#include "fsdp/device_mesh.h"

namespace fsdp::weights {

/// A row of ranks along which entries are gathered. In it, those ranks receive that are to have whole tensors, or pass on in the rows
/// behind it what they receive.
struct GatherRow {
  std::shared_ptr<comm::Communicator> ranks;
  std::vector<bool> receives;

  bool receives_here() const { return receives[static_cast<std::size_t>(ranks->rank())]; }
  bool some_receive() const { return std::ranges::find(receives, true) != receives.end(); }
};

/// How entries come to the ranks that receive them.
///
/// [Note: Each byte once] If all ranks receive, entries are gathered along one dimension of the mesh after the other, and each rank gets
/// each byte once. If some receive, a byte would be sent again by each rank that passes it on. The ranks of several dimensions then have
/// one row that joins them, in which each sends straight to who receives, if the mesh can make one (comm::joined_row).
struct Route {
  /// The rows over which the entries are cut, in the order of the gathers: that of an outer dimension that cuts shards once more, the one
  /// that shards, and those of the assembly, from the last dimension to the first. What a rank has after each of them lies within what it
  /// has after the next.
  std::vector<std::shared_ptr<comm::Communicator>> cut_over;
  std::vector<GatherRow> rows;  ///< Those of the gathers: the same, or the one that joins them.
  bool is_joined = false;       ///< The latter.
};

/// The routes of a stream.
class Routes {
 public:
  /// `mesh`: keeps the rows that are joined. `receives`: this rank is to have whole tensors.
  Routes(DeviceMesh mesh, bool receives) : mesh_(std::move(mesh)), receives_(receives) {}

  /// The route of an entry that is cut. Collective over its ranks, which ask for the same entries in the same order. Throws CommError.
  const Route& of(const Entry& entry);
  std::span<const std::unique_ptr<Route>> all() const { return routes_; }

 private:
  DeviceMesh mesh_;
  bool receives_ = true;
  std::vector<std::unique_ptr<Route>> routes_;
};

/// Units [begin, begin + size) of a tensor (elements), or of a buffer (bytes).
struct Range {
  std::int64_t begin = 0;
  std::int64_t size = 0;
};

/// An entry on its route.
struct Course {
  const Route* route = nullptr;  ///< Null for an entry that is not cut.
  std::vector<Range> ranges;     ///< What this rank owns, and what it may have after each gather; the last one is the whole. In elements.
  std::vector<std::vector<std::int64_t>> numel;  ///< What the ranks of each row bring, by row and rank. In elements.
};

/// The courses of entries, by entry. Collective, as Routes::of.
std::vector<Course> courses_of(std::span<const Entry> entries, Routes& routes);

}  // namespace fsdp::weights
