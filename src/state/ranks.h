#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/mesh/joined_row.h"
#include "comm/mesh/ranks.h"
#include "engine/engine.h"

namespace fsdp::state {

/// The ranks that write or read a checkpoint together. Not thread-safe.
class CheckpointRanks {
 public:
  enum class Groups : std::uint8_t {
    kOfMesh,  ///< Uses the mesh's own communicators, so it must not run beside training.
    kOwn,     ///< Makes communicators of its own (collective), so another thread may use it while the model trains.
  };
  /// Makes the set of all ranks that hold parts of the engine's model: those of its mesh, and those that hold other tensor-parallel pieces.
  CheckpointRanks(const engine::Engine& engine, Groups groups);
  /// Makes the set of all ranks of a mesh, which uses the mesh's own communicators.
  explicit CheckpointRanks(const DeviceMesh& mesh);

  std::int64_t size() const { return ranks_.size(); }
  /// This rank's position: the tensor-parallel one varies slowest, the mesh's last dimension fastest.
  std::int64_t index() const { return ranks_.index(); }

  /// True on all ranks if `ok` is true on all of them. Collective. Throws CommError.
  bool all(bool ok, const char* operation) const;

  /// Rank 0's bytes on all. Collective. Throws CommError.
  std::string broadcast(const std::string& text, const char* operation) const;

  /// Every rank's bytes, by index, on rank 0; nothing on the others: they may be large where there are many ranks. Collective. Throws
  /// CommError.
  std::vector<std::string> gather(const std::string& mine, const char* operation) const;
  /// Every rank's bytes, by index, on all ranks. Collective. Throws CommError.
  std::vector<std::string> gather_everywhere(const std::string& mine, const char* operation) const;

  /// Connects pairs of ranks, by their indices: see comm::connect_pairs(). Collective. Throws Error, CommError.
  std::vector<std::shared_ptr<comm::Communicator>> connect(const std::vector<comm::RankPair>& pairs) const;

  /// Runs `work` on each rank, and then calls agree(). Collective; `work` itself need not be.
  void together(const std::string& what, const std::function<void()>& work) const;

  /// Ranks exchange whether they failed (null: no). If one did, throws Error on all: `what`, and every rank's message; a DamageError if
  /// damage is the only cause. Collective.
  void agree(const std::exception_ptr& failure, const std::string& what) const;

 private:
  CheckpointRanks(DeviceMesh mesh, std::vector<std::shared_ptr<comm::Communicator>> rows);

  DeviceMesh mesh_;
  std::vector<std::shared_ptr<comm::Communicator>> rows_;
  comm::Ranks ranks_;
};

}  // namespace fsdp::state
