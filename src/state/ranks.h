#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "comm/ranks.h"
#include "engine/engine.h"

namespace fsdp::state {

/// The ranks that write or read a checkpoint together. Not thread-safe.
class Ranks {
 public:
  enum class Groups : std::uint8_t {
    kOfMesh,  ///< Speaks through the mesh's own communicators: not beside training.
    kOwn,     ///< Makes communicators (collective): may be used from another thread while the model trains.
  };
  /// All that hold parts of the engine's model: of its mesh, and of its tensor-parallel pieces.
  Ranks(const engine::Engine& engine, Groups groups);

  std::int64_t size() const { return ranks_.size(); }
  /// This rank's position: the tensor-parallel one varies slowest, the mesh's last dimension fastest.
  std::int64_t index() const { return ranks_.index(); }

  /// Every rank's bytes, by index. Collective. Throws CommError.
  std::vector<std::string> gather(const std::string& mine, const char* operation) const;

  /// The same for rank 0 alone, others get nothing: for what is large when there are many ranks.
  std::vector<std::string> gather_at_first(const std::string& mine, const char* operation) const;

  /// Runs `work` on each rank; then agree(). Collective, but for `work`.
  void together(const std::string& what, const std::function<void()>& work) const;

  /// Ranks tell each other whether they failed (null: no). If one did, throws Error on all: `what`, and every rank's message; a DamageError
  /// if damage is all that was found. Collective.
  void agree(const std::exception_ptr& failure, const std::string& what) const;

 private:
  comm::Ranks ranks_;
  c10::Device device_;  // what the communicators speak of lies there
};

}  // namespace fsdp::state
