#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {

namespace weights {
class WeightStream;
struct SavedWeights;
}  // namespace weights

/// Which ranks receive unsharded weights. The others send their shards, and receive nothing.
enum class WeightReceivers : std::uint8_t {
  kAll,
  kFirst,       ///< The first rank of the mesh.
  kOnePerHost,  ///< The first rank of each host.
};

/// The weights that the receivers have, bit for bit: this rank's shards in the dtype in which they were last sent. With a snapshot
/// (FullWeightsOptions::since), full_weights sends only values that differ from it, and updates it. A new snapshot is empty, so everything
/// is sent. Everything is also sent after a stream that did not reach its end on all ranks, because some receivers may have a part of it.
///
/// It belongs to one plan (TransferPlan::run), or to one kind of stream: tensors of the same names, shapes, dtypes and sharding, and the
/// same receivers. It does not keep the model alive, and may be used for another model of the same kind. Each rank has a snapshot of its
/// own, and all ranks use theirs together. Not thread-safe.
class WeightSnapshot {
 public:
  /// `device`: where the copies are kept; by default, on the device of each shard.
  explicit WeightSnapshot(std::optional<at::Device> device = {});
  ~WeightSnapshot();
  WeightSnapshot(const WeightSnapshot&) = delete;
  WeightSnapshot& operator=(const WeightSnapshot&) = delete;

  /// The bytes that it holds on this rank: those of the rank's shards in the dtype in which they are sent.
  std::int64_t nbytes() const;

  /// For the library's own use.
  weights::SavedWeights& saved() { return *saved_; }

 private:
  friend class weights::WeightStream;
  std::unique_ptr<weights::SavedWeights> saved_;
};

/// An adapter of low rank (LoRA): scale * up down, a product of two thin matrices that is added to a weight.
struct WeightAdapter {
  std::string weight;       ///< The name of the matrix to which it is added: [rows, columns].
  std::string up;           ///< The name of B: [rows, rank].
  std::string down;         ///< The name of A: [rank, columns].
  double scale = 1;         ///< The factor.
  bool transposed = false;  ///< The weight is the transpose of the product: [columns, rows].
};

/// Options of full_weights.
struct FullWeightsOptions {
  /// The most bytes of a bucket, in the dtype in which tensors are sent. A tensor that is larger has a bucket of its own.
  std::int64_t bucket_bytes = std::int64_t{128} << 20;
  /// Floating-point tensors are converted to this dtype before they are sent. By default they keep that of the main parameters.
  std::optional<at::ScalarType> dtype = {};
  /// The names of the tensors to send; by default all parameters and buffers.
  std::optional<std::vector<std::string>> names = {};
  WeightReceivers ranks = WeightReceivers::kAll;  ///< The ranks that receive.
  /// Returns the receiver's name of one of the model's tensors; by default they are the same. Two tensors must not get one name.
  std::function<std::string(const std::string& name)> rename = {};
  /// Adapters to merge: receivers get weight + scale * up down, with all adapters of the weight, instead of the weight and the adapters'
  /// matrices. The model does not change. Each rank merges its own part, with unsharded adapters. Sums are computed in fp32 (fp64, if one
  /// of the tensors has it) and rounded once, to the dtype in which the weight is sent.
  std::vector<WeightAdapter> merge_adapters = {};
  /// Sends only values that differ from this snapshot: as changes of single elements (WeightBucket::changes) if these have fewer bytes,
  /// otherwise the complete tensor. The snapshot is updated.
  std::shared_ptr<WeightSnapshot> since = {};
};

/// New values for some elements of a tensor.
struct WeightChange {
  std::string name;                 ///< The name of the tensor, as in WeightBucket::weights.
  std::vector<std::int64_t> shape;  ///< The shape of the unsharded tensor.
  /// The positions of the elements in the flattened tensor, each once: 1-D, int32, or int64 for tensors of 2^31 elements and more.
  at::Tensor positions;
  at::Tensor values;  ///< The new values: 1-D, as many as positions.
};

/// Unsharded tensors with their names: views of one buffer, in the order of the model's parameters and then its buffers. All fields are
/// empty on ranks that do not receive. The next bucket reuses the memory, and using the tensors then is an error: clone them to keep them.
struct WeightBucket {
  std::vector<std::pair<std::string, at::Tensor>> weights;  ///< Names with unsharded tensors.
  std::vector<WeightChange> changes;                        ///< Changes of other tensors, with FullWeightsOptions::since.
  at::Tensor flat;                                          ///< The buffer: 1-D, bytes. Each tensor begins at a multiple of 64 bytes.
};

/// A range of buckets, for one pass:
///
/// for (const auto& bucket : fsdp::full_weights(*model, {.dtype = torch::kBFloat16})) {
///   for (const auto& [name, weight] : bucket.weights) send(name, weight);
/// }
///
/// While a program uses one bucket, the next one is gathered. Memory for two buckets is counted as gathered parameters.
///
/// All ranks iterate over all buckets, or stop. A rank may stop at any time, by destroying the range or by close(). It then waits until the
/// other ranks ask for their next bucket, which throws Error there, and training can continue. End the range before you use the model
/// again: a forward, a backward or an optimizer's step ends an open range, and throws Error.
class FullWeights {
 public:
  /// An input iterator: a bucket is valid until the iterator is incremented.
  class iterator {
   public:
    using iterator_category = std::input_iterator_tag;  ///< For one pass.
    using value_type = WeightBucket;                    ///< The type of its elements.
    using difference_type = std::ptrdiff_t;             ///< As std::iterator_traits asks.
    using pointer = const WeightBucket*;                ///< See operator->().
    using reference = const WeightBucket&;              ///< See operator*().

    iterator() = default;
    /// For the library's own use: takes the first bucket.
    explicit iterator(FullWeights* range) : range_(range) { ++*this; }
    /// The current bucket of this rank.
    reference operator*() const { return *range_->bucket_; }
    /// A pointer to the current bucket.
    pointer operator->() const { return &*range_->bucket_; }
    /// Advances to the next bucket. Collective. Throws Error if another rank has stopped, and CommError.
    iterator& operator++();
    /// Advances to the next bucket, as operator++().
    void operator++(int) { ++*this; }
    /// True after the last bucket.
    bool operator==(std::default_sentinel_t) const { return range_ == nullptr; }

   private:
    FullWeights* range_ = nullptr;
  };

  /// For the library's own use.
  explicit FullWeights(std::unique_ptr<weights::WeightStream> stream);
  /// Calls close().
  ~FullWeights();
  /// Moves the range; the other object has then ended.
  FullWeights(FullWeights&&) noexcept;

  /// Gathers the first bucket. Collective; call it once.
  iterator begin() { return iterator(this); }
  /// Compares equal to an iterator after the last bucket.
  std::default_sentinel_t end() const { return {}; }
  /// Stops before the last bucket. Collective, as described above.
  void close();
  /// The number of buckets.
  std::size_t size() const;
  /// The fraction of all elements that differ from FullWeightsOptions::since. It is 1 without a snapshot, and if everything is sent.
  double changed_fraction() const;

 private:
  std::unique_ptr<weights::WeightStream> stream_;
  std::optional<WeightBucket> bucket_;
};

/// Returns the unsharded main parameters and buffers of a sharded model, in buckets. `module`: the root, or any unit of the model.
/// Tensor-parallel parameters are complete, too. Collective, also over the ranks that have their pieces. Call it between steps, or between
/// microbatches: it reads main parameters, and changes nothing. Throws Error on every rank if names are unknown, if adapters do not fit
/// their weights, or if these are tensor-parallel, if the options differ between ranks, and inside of a backward.
FullWeights full_weights(torch::nn::Module& module, FullWeightsOptions options = {});

}  // namespace fsdp
