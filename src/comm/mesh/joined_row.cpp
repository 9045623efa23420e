#include "comm/mesh/joined_row.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "base/stable_hash.h"
#include "comm/mesh/device_mesh_state.h"
#include "comm/mesh/ranks.h"

namespace fsdp::comm {
namespace {

constexpr Label kMeeting = {.operation = "connections across mesh dimensions", .unit = {}};

}  // namespace

std::shared_ptr<Communicator> joined_row(const DeviceMesh& mesh, const std::vector<std::shared_ptr<Communicator>>& rows) {
  const auto& joined = mesh.state()->joined;
  if (joined == nullptr) return nullptr;
  if (const auto found = joined->made.find(rows); found != joined->made.end()) return found->second;
  // Ranks may have made different numbers of such communicators, with others: all take the largest one.
  static std::atomic<std::int64_t> next{0};
  const Ranks ranks(rows);
  const auto all = ranks.exchange(at::tensor({mesh.rank(), next.load()}, at::kLong), kMeeting);
  const auto number = all.select(1, 1).max().item<std::int64_t>();
  next = number + 1;
  Row row{.dim = "(several)", .rank = static_cast<int>(ranks.index()), .global_ranks = {}, .world_size = mesh.state()->world_size};
  std::string name;
  for (std::int64_t rank = 0; rank < ranks.size(); ++rank) {
    row.global_ranks.push_back(all.const_data_ptr<std::int64_t>()[2 * rank]);
    name += std::to_string(row.global_ranks.back()) + ",";
  }
  auto made = joined->make(row, std::to_string(stable_hash(name)) + "/" + std::to_string(number));
  return joined->made.emplace(rows, std::move(made)).first->second;
}

std::vector<Communicator*> joined_rows_of(const DeviceMesh& mesh) {
  std::vector<Communicator*> all;
  if (mesh.state()->joined == nullptr) return all;
  for (const auto& [rows, communicator] : mesh.state()->joined->made) all.push_back(communicator.get());
  return all;
}

}  // namespace fsdp::comm
