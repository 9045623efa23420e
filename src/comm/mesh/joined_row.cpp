#include "comm/mesh/joined_row.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "base/stable_hash.h"
#include "comm/mesh/device_mesh_state.h"
#include "comm/mesh/ranks.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

constexpr Label kMeeting = {.operation = "connections across mesh dimensions", .unit = {}};

/// What the ranks along several rows agree on before they make communicators of each other.
struct Agreed {
  std::vector<std::int64_t> global_ranks;
  std::int64_t number = 0;  // No communicator of these ranks was made under it.
};

Agreed agree_on_number(const DeviceMesh& mesh, const Ranks& ranks) {
  // Ranks may have made different numbers of such communicators, with others: all take the largest one.
  static std::atomic<std::int64_t> next{0};
  const auto all = ranks.exchange(at::tensor({mesh.rank(), next.load()}, at::kLong), kMeeting);
  Agreed agreed{.global_ranks = {}, .number = all.select(1, 1).max().item<std::int64_t>()};
  next = agreed.number + 1;
  for (std::int64_t rank = 0; rank < ranks.size(); ++rank) agreed.global_ranks.push_back(all.const_data_ptr<std::int64_t>()[2 * rank]);
  return agreed;
}

std::string name_of(const Row& row, std::int64_t number) {
  std::string name;
  for (const auto rank : row.global_ranks) name += std::to_string(rank) + ",";
  return std::to_string(stable_hash(name)) + "/" + std::to_string(number);
}

}  // namespace

std::shared_ptr<Communicator> joined_row(const DeviceMesh& mesh, const std::vector<std::shared_ptr<Communicator>>& rows) {
  const auto& joined = mesh.state()->joined;
  if (joined == nullptr || !mesh.device().is_cpu()) return nullptr;
  if (const auto found = joined->made.find(rows); found != joined->made.end()) return found->second;
  const Ranks ranks(rows);
  auto [global_ranks, number] = agree_on_number(mesh, ranks);
  const Row row{.dim = "(several)",
                .rank = static_cast<int>(ranks.index()),
                .global_ranks = std::move(global_ranks),
                .world_size = mesh.state()->world_size};
  return joined->made.emplace(rows, joined->make(row, name_of(row, number))).first->second;
}

std::vector<std::shared_ptr<Communicator>> connect_pairs(const DeviceMesh& mesh, const std::vector<std::shared_ptr<Communicator>>& rows,
                                                         const std::vector<RankPair>& pairs) {
  const auto& joined = mesh.state()->joined;
  if (joined == nullptr) throw Error("the ranks of this mesh communicate by collectives of the program, which cannot connect two of them");
  const Ranks ranks(rows);
  const auto [global_ranks, number] = agree_on_number(mesh, ranks);
  std::vector<std::shared_ptr<Communicator>> made;
  // All ranks go through the pairs in one order, so that no ranks wait for each other in a circle.
  for (const auto& [sender, receiver] : pairs) {
    if (ranks.index() != sender && ranks.index() != receiver) continue;
    const Row row{.dim = "(pair)",
                  .rank = ranks.index() == sender ? 0 : 1,
                  .global_ranks = {global_ranks[static_cast<std::size_t>(sender)], global_ranks[static_cast<std::size_t>(receiver)]},
                  .world_size = mesh.state()->world_size};
    made.push_back(joined->make_for_messages(row, name_of(row, number)));
  }
  return made;
}

std::vector<Communicator*> joined_rows_of(const DeviceMesh& mesh) {
  std::vector<Communicator*> all;
  if (mesh.state()->joined == nullptr) return all;
  for (const auto& [rows, communicator] : mesh.state()->joined->made) all.push_back(communicator.get());
  return all;
}

}  // namespace fsdp::comm
