#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "state/ranks.h"

namespace fsdp::state {

/// The hosts of ranks: ranks that see the same folder at their paths are on one host. Hosts are numbered in the order of their first ranks.
struct Hosts {
  std::vector<std::size_t> of_rank;              ///< By the ranks' indices.
  std::vector<std::vector<std::int64_t>> ranks;  ///< By host; the first one leads it.

  /// Finds them. Collective.
  static Hosts find(const std::string& folder, const CheckpointRanks& ranks);
  std::size_t own(const CheckpointRanks& all) const { return of_rank[static_cast<std::size_t>(all.index())]; }
  bool leads(const CheckpointRanks& all) const { return ranks[own(all)].front() == all.index(); }
};

/// A step in the memory of hosts. Each host that has a folder of this step has its sidecar and some of its files.
struct MemoryStep {
  struct File {
    std::int64_t size = 0;
    std::vector<std::size_t> hosts = {};  ///< Those that hold it.
  };
  std::string name;
  std::int64_t saved = 0;
  std::map<std::string, File> files;  ///< The listed ones, and the sidecar.

  bool is_on(std::size_t host, const std::string& file) const;
  /// Names the files that no host holds; empty if there are none.
  std::string missing() const;
};

/// The steps in the memory of all hosts.
struct MemorySteps {
  std::vector<MemoryStep> steps;    ///< Newest first.
  std::vector<std::string> faults;  ///< Of folders that are no steps, because their sidecars are damaged.

  /// Finds them. Sizes are compared, contents are not. Collective. Throws Error on all ranks if the system does not allow one to find out.
  static MemorySteps find(const std::string& folder, const Hosts& hosts, const CheckpointRanks& ranks);
};

/// Reads what the hosts hold of a step, and removes what is damaged from `step`. Returns the faults. Collective.
std::vector<std::string> drop_damaged(MemoryStep& step, const std::string& folder, const Hosts& hosts, const CheckpointRanks& ranks);

/// A step in memory as a rank loads it: files of its own host, and the blocks of other files that other hosts have sent. These are removed
/// at the end.
class HeldStep {
 public:
  /// All files of `step` are somewhere. The arguments must outlive it.
  HeldStep(std::string folder, const MemoryStep& step, const Hosts& hosts, const CheckpointRanks& ranks);
  ~HeldStep();
  HeldStep(const HeldStep&) = delete;
  HeldStep& operator=(const HeldStep&) = delete;

  /// Fetches what any load reads before it knows which tensors it needs: the metadata, plain values and small tensors. Collective.
  void open();

  /// Gets the blocks with these bytes from other hosts where this host does not hold them. Each rank has its own. Collective.
  void fetch(const std::vector<ckpt::RecordLocation>& needed);

  /// The folder of the step on this host, where it need not exist.
  std::string path() const { return (std::filesystem::path(folder_) / step_.name).string(); }
  /// The path of a file on this host.
  std::filesystem::path path_of(const std::string& file) const;
  /// Describes where the bytes came from: "memory of this host", or also how many came from other hosts.
  std::string origin() const;

 private:
  bool is_elsewhere(const std::string& file) const;
  std::vector<ckpt::RecordLocation> missing_blocks(const std::vector<ckpt::RecordLocation>& needed);
  void receive(const std::string& file, std::int64_t offset, std::span<const char> data);

  const std::string folder_;
  const MemoryStep& step_;
  const Hosts& hosts_;
  const CheckpointRanks& ranks_;
  std::optional<ckpt::TemporaryStep> received_;
  std::set<std::pair<std::string, std::int64_t>> asked_;  // files and blocks
  std::int64_t received_bytes_ = 0;
};

}  // namespace fsdp::state
