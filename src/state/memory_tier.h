#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/memory_folder.h"
#include "comm/mesh/joined_row.h"
#include "state/memory_steps.h"
#include "state/phases.h"
#include "state/ranks.h"
#include "state/snapshot.h"

namespace fsdp::state {

/// Saves steps in the memory of hosts. Each host has a folder of its own, in which its first rank commits a step. A host's step has the
/// sidecar and the metadata of the whole checkpoint, the files of its ranks, and copies of those of another host.
///
/// [Note: One complete step] A step is removed only when a later one is complete on all hosts. So there is always one whose files are all
/// somewhere, also while the next one is written, and never more than two. Only the first save after a restart keeps two beside its own, if
/// the newest step had not been committed on all hosts.
class MemoryTier {
 public:
  /// `ranks` must outlive it, and have connections of its own. `folder`, `distance`: see AsyncSaverOptions. Collective. Throws Error on
  /// every rank if the folder can't be used on one.
  MemoryTier(const CheckpointRanks& ranks, const std::string& folder, int distance);

  /// Writes the parts of all ranks as a step. `saved`: rank 0's becomes Sidecar::saved. Collective. Throws Error on every rank if it fails
  /// on one; earlier steps are then unchanged.
  void write(const std::string& name, const Snapshot& snapshot, std::int64_t saved, Phases& phases);
  /// Removes the folders of all hosts; nothing can be written after that. Collective. Throws Error on every rank if one fails.
  void remove();

 private:
  bool leads() const { return hosts_.leads(ranks_); }
  void copy(const std::string& step, std::int64_t own_bytes);

  const CheckpointRanks& ranks_;
  const std::string path_;
  Hosts hosts_;
  std::optional<ckpt::MemoryFolder> folder_;                // on the rank that leads its host
  std::vector<comm::RankPair> copies_;                      // the ranks that send their files, and those that keep the copies
  std::vector<std::shared_ptr<comm::Communicator>> pairs_;  // of this rank
  std::vector<std::string> kept_;                           // the steps that stay until the next one is complete
};

}  // namespace fsdp::state
