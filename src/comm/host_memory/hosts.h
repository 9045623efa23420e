#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <type_traits>
#include <vector>

// Exchanges among the ranks of a row before they can run collectives.
namespace fsdp::comm {

/// Returns every rank's bytes, by its position in the row, which is `rank` for this one. `global_ranks` has their global ranks by position,
/// for errors. All ranks give the same number of bytes. Collective over `gloo`; blocks. Throws std::runtime_error if a message can't be
/// sent or received.
std::vector<std::string> exchange_bytes(int rank, std::span<const std::int64_t> global_ranks, c10d::Backend& gloo, int tag,
                                        const std::string& mine);

/// Returns every rank's record, by position.
template <typename Record>
std::vector<Record> exchange_records(int rank, std::span<const std::int64_t> global_ranks, c10d::Backend& gloo, int tag,
                                     const Record& mine) {
  static_assert(std::is_trivially_copyable_v<Record>);
  std::vector<Record> records;
  for (const std::string& bytes : exchange_bytes(rank, global_ranks, gloo, tag, {reinterpret_cast<const char*>(&mine), sizeof(Record)})) {
    std::memcpy(&records.emplace_back(), bytes.data(), sizeof(Record));
  }
  return records;
}

/// The kernel's boot id. Two processes have the same one only if they are on the same host. All zeros if the system does not provide it.
struct Boot {
  char id[40] = {};
  static Boot of_this_host();
  bool is_known() const { return id[0] != '\0'; }
  bool operator==(const Boot& other) const { return std::strncmp(id, other.id, sizeof(id)) == 0; }
};

/// Returns how many ranks each host of a row has, if the row consists of hosts with equal numbers of ranks, one host's ranks after the
/// other's. Otherwise 1.
int ranks_per_host(std::span<const Boot> hosts);
/// Returns this number for the hosts of these ranks. Collective over `gloo`, as exchange_bytes().
int ranks_per_host(int rank, std::span<const std::int64_t> global_ranks, c10d::Backend& gloo);

}  // namespace fsdp::comm
