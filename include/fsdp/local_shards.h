#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace fsdp {

namespace engine {
class Engine;
}

/// A box of a whole tensor, elements [offsets[d], offsets[d] + sizes[d]) of every dimension d, and its values.
struct LocalBox {
  std::vector<std::int64_t> offsets;  ///< Of its first element in the whole tensor, by dimension.
  std::vector<std::int64_t> sizes;    ///< By dimension, in elements.
  at::Tensor tensor;                  ///< Of these sizes, contiguous: a view of the main parameters. Read it, and do not write.
};

/// What this rank has of one parameter.
struct LocalShard {
  std::string name;                 ///< Fully qualified, as named_parameters() gives it.
  at::ScalarType dtype;             ///< That of the main parameter.
  std::vector<std::int64_t> shape;  ///< The shape of the whole tensor, also of one that is tensor-parallel.
  /// With element granularity a shard may begin and end within a row, and is then several boxes, at most 2 * dimensions - 1. They follow
  /// one another in memory. Empty if this rank has nothing of the parameter.
  std::vector<LocalBox> boxes;
};

/// For as long as it exists, what writes main parameters waits: optimizers' steps, loads, replays, write-backs of operators. On the thread
/// that made it, they throw Error instead, as they would wait for ever. Destroy it on the same thread.
///
/// Waiting is the host's. On a device, the caller orders its reads behind the stream on which the last step ran (an event, or a
/// synchronization before other hardware reads), and destroys the guard when the device has ended them.
class [[nodiscard]] ReadingGuard {
 public:
  /// For the library's own use.
  explicit ReadingGuard(engine::Engine& engine);
  ~ReadingGuard();
  ReadingGuard(const ReadingGuard&) = delete;
  ReadingGuard& operator=(const ReadingGuard&) = delete;

 private:
  std::promise<void> ended_;
};

/// This rank's shards of a model by address. The addresses stay until fully_unshard, and the memory as long as this object exists, even if
/// the model does not.
class LocalShards {
 public:
  /// For the library's own use.
  LocalShards(std::shared_ptr<engine::Engine> engine, std::vector<LocalShard> shards);

  /// In the order of named_parameters(), parameters that are tied once.
  const std::vector<LocalShard>& shards() const& { return shards_; }
  /// A loop over the shards of a temporary object would outlive them: keep the object in a variable.
  const std::vector<LocalShard>& shards() && = delete;
  /// False after fully_unshard: the model no longer uses this memory.
  bool is_valid() const;
  /// Begins to read, after what operators have written has been written back. Waits for another reader. Make it between steps: where
  /// another thread trains, the program orders the two. Throws Error if the model was made ordinary again, or a load of it has failed.
  ReadingGuard reading() const;

 private:
  std::shared_ptr<engine::Engine> engine_;
  std::vector<LocalShard> shards_;
};

/// Returns this rank's shards of the main parameters. `module`: the root, or a unit, of which the whole model is given. Copies nothing,
/// and is not collective. Parameters whose optimizer state is replicated (ZeRO-0) are whole on each rank. Values that operators have
/// written to whole parameters are in the shards when a reading begins. Throws Error if the module is not sharded.
LocalShards local_shards(torch::nn::Module& module);

}  // namespace fsdp
