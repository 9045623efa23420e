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

/// A row of ranks along which entries are gathered. The ranks that receive in it are those that get complete tensors, or forward the data
/// in later rows.
struct GatherRow {
  std::shared_ptr<comm::Communicator> ranks;
  std::vector<bool> receives;

  bool receives_here() const { return receives[static_cast<std::size_t>(ranks->rank())]; }
  bool some_receive() const { return std::ranges::find(receives, true) != receives.end(); }
};

/// The path of entries to the ranks that receive them.
///
/// [Note: Each byte once] If all ranks receive, entries are gathered along one dimension of the mesh after the other, and each rank gets
/// each byte once. If only some receive, each rank that forwards a byte would send it again. The ranks of several dimensions then have one
/// row that joins them, in which each sends straight to the receivers, if the mesh can make one (comm::joined_row).
struct Route {
  /// The rows over which the entries are cut, in the order of the gathers: that of an outer dimension that cuts shards once more, the one
  /// that shards, and those of the assembly, from the last dimension to the first. The data that a rank has after each gather lie within
  /// those after the next one.
  std::vector<std::shared_ptr<comm::Communicator>> cut_over;
  std::vector<GatherRow> rows;  ///< The rows of the gathers: the same, or the one that joins them.
  bool is_joined = false;       ///< The latter.
};

/// The routes of a stream.
class Routes {
 public:
  /// `mesh`: keeps the rows that are joined. `receives`: whether this rank gets complete tensors.
  Routes(DeviceMesh mesh, bool receives) : mesh_(std::move(mesh)), receives_(receives) {}

  /// The route of an entry that is cut. Collective over its ranks, which request the same entries in the same order. Throws CommError.
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
  std::vector<Range> ranges;     ///< The range that this rank owns, and the ranges that it may have after each gather; the last one is the
                                 ///< complete entry. In elements.
  std::vector<std::vector<std::int64_t>> numel;  ///< The contributions of the ranks of each row, by row and rank. In elements.
};

/// The courses of entries, by entry. Collective, as Routes::of.
std::vector<Course> courses_of(std::span<const Entry> entries, Routes& routes);

}  // namespace fsdp::weights
