#include "plan/planned_mesh.h"

#include <algorithm>
#include <string>

#include "comm/mesh/null_mesh.h"
#include "comm/traffic.h"
#include "engine/unit.h"
#include "fsdp/plan.h"

namespace fsdp::planning {

DeviceMesh PlannedMeshes::of(const DeviceMesh& mesh) {
  Rows rows;
  for (const auto& dim : mesh.dims()) rows.push_back(mesh.communicator(dim.name));
  const auto found = std::ranges::find(known_, rows, &std::pair<Rows, DeviceMesh>::first);
  if (found != known_.end()) return found->second;
  const auto communicators = engine::communicators_of(mesh, separate_reduce_group_, neighbours_);
  std::vector<std::pair<std::int64_t, Rows::value_type>> by_stride;
  std::int64_t stride = mesh.size();
  for (std::size_t d = 0; d < rows.size(); ++d) {
    stride /= mesh.dims()[d].size;
    if (rows[d]->size() > 1) by_stride.emplace_back(stride, rows[d]);
  }
  const auto traffic = [by_stride, neighbours = communicators.post_forward](int size, std::int64_t stride) {
    for (const auto& [one, row] : by_stride) {
      if (one == stride && row->size() == size) return row->traffic();
    }
    return neighbours && neighbours->size() == size ? neighbours->traffic() : comm::Traffic::by_messages(size);
  };
  return known_
      .emplace_back(
          std::move(rows),
          comm::make_null_mesh(
              {.dims = mesh.dims(), .rank = 0, .device = c10::Device(c10::kMeta), .stands_for = mesh.device_type(), .traffic = traffic}))
      .second;
}

std::vector<DeviceMesh> larger_meshes(const DeviceMesh& mesh) {
  constexpr std::int64_t kMostTimes = 64;
  std::vector<DeviceMesh> larger;
  for (std::int64_t times = 2; times <= kMostTimes; times *= 2) {
    auto dims = mesh.dims();
    dims.back().size *= times;
    larger.push_back(planned_device_mesh(mesh.device_type() == c10::kCPU ? "cpu" : "cuda", std::move(dims)));
  }
  return larger;
}

}  // namespace fsdp::planning
