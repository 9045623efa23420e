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

/// A chunk of a tensor, elements [offsets[d], offsets[d] + sizes[d]) of every dimension d (as in DCP), and its values.
struct LocalBox {
  std::vector<std::int64_t> offsets;  ///< Of its first element in the complete tensor, by dimension.
  std::vector<std::int64_t> sizes;    ///< By dimension, in elements.
  at::Tensor tensor;                  ///< Of these sizes, contiguous: a view of the main parameters. Read it, and do not write.
};

/// This rank's shard of one parameter.
struct LocalShard {
  std::string name;                 ///< Fully qualified, as named_parameters() gives it.
  at::ScalarType dtype;             ///< That of the main parameter.
  std::vector<std::int64_t> shape;  ///< The shape of the complete tensor, also of a tensor-parallel one.
  /// With element granularity a shard may begin and end within a row. It then consists of several chunks, at most 2 * dimensions - 1, which
  /// follow one another in memory. Empty if this rank has nothing of the parameter.
  std::vector<LocalBox> boxes;
};

/// During its lifetime, all functions that write main parameters wait: optimizers' steps, loads, replays, write-backs of operators. On the
/// thread that made it, they throw Error instead, because they would wait for ever. Destroy it on the same thread.
///
/// Only the host waits. On a device, the caller orders its reads after the stream on which the last step ran (by an event, or a
/// synchronization before other hardware reads), and destroys the guard when the device has completed the reads.
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

/// This rank's shards of a model by address. The addresses are valid until fully_unshard. The memory is kept as long as this object exists,
/// even if the model does not.
class LocalShards {
 public:
  /// For the library's own use.
  LocalShards(std::shared_ptr<engine::Engine> engine, std::vector<LocalShard> shards);

  /// In the order of named_parameters(). A tied parameter appears once.
  const std::vector<LocalShard>& shards() const& { return shards_; }
  /// A loop over the shards of a temporary object would outlive them: keep the object in a variable.
  const std::vector<LocalShard>& shards() && = delete;
  /// False after fully_unshard: the model no longer uses this memory.
  bool is_valid() const;
  /// Begins to read, after writes of operators have been written back. Waits for another reader. Call it between steps; if another thread
  /// trains, the program has to order the two. Throws Error after fully_unshard, or if a load of the model has failed.
  ReadingGuard reading() const;

 private:
  std::shared_ptr<engine::Engine> engine_;
  std::vector<LocalShard> shards_;
};

/// Returns this rank's shards of the main parameters. `module`: the root, or any unit of the model. Copies nothing, and is not collective.
/// Parameters whose optimizer state is replicated (ZeRO-0) are complete on each rank. Values that operators have written to unsharded
/// parameters are in the shards when a reading begins. Throws Error if the module is not sharded.
LocalShards local_shards(torch::nn::Module& module);

}  // namespace fsdp
