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

/// Which ranks get whole weights. The others send what they have, and receive nothing.
enum class WeightReceivers : std::uint8_t {
  kAll,
  kFirst,       ///< The first rank of the mesh.
  kOnePerHost,  ///< The first rank of each host.
};

/// What the receivers of a model's weights have, as bits: this rank's shards in the dtype in which they travelled last. A stream that is
/// given it (FullWeightsOptions::since) sends what is not the same, and makes it the same. At first it has nothing, so all is sent. All is
/// sent, too, after a stream that did not come to its end on all ranks: some receivers may then have a part of it.
///
/// It belongs to one plan (TransferPlan::run), or to one kind of stream: tensors of the same names, shapes, dtypes and division, and the
/// same receivers. It does not keep the
/// model alive, and may be used for another one of the same kind. Each rank has its own, and all ranks use theirs together. Not
/// thread-safe.
class WeightSnapshot {
 public:
  /// `device`: where the bits are kept; by default, each beside its shard.
  explicit WeightSnapshot(std::optional<at::Device> device = {});
  ~WeightSnapshot();
  WeightSnapshot(const WeightSnapshot&) = delete;
  WeightSnapshot& operator=(const WeightSnapshot&) = delete;

  /// The bytes that it holds on this rank: as many as its shards have in the dtype that travels.
  std::int64_t nbytes() const;

  /// For the library's own use.
  weights::SavedWeights& saved() { return *saved_; }

 private:
  friend class weights::WeightStream;
  std::unique_ptr<weights::SavedWeights> saved_;
};

/// An adapter of low rank (LoRA): scale * up down, a product of two thin matrices beside a weight.
struct WeightAdapter {
  std::string weight;       ///< The name of the matrix to which it is added: [rows, columns].
  std::string up;           ///< The name of B: [rows, rank].
  std::string down;         ///< The name of A: [rank, columns].
  double scale = 1;         ///< The factor.
  bool transposed = false;  ///< The weight is the transpose of the product: [columns, rows].
};

/// What full_weights gives, and to whom.
struct FullWeightsOptions {
  /// The most bytes of a bucket, in the dtype that travels. A tensor that is larger has a bucket of its own.
  std::int64_t bucket_bytes = std::int64_t{128} << 20;
  /// Floating-point tensors are converted to this dtype before they are sent. By default they keep that of the main parameters.
  std::optional<at::ScalarType> dtype = {};
  /// Only these; by default all parameters and buffers.
  std::optional<std::vector<std::string>> names = {};
  WeightReceivers ranks = WeightReceivers::kAll;  ///< The ranks that receive.
  /// Returns the receiver's name for one of the model's; by default they are the same. Two that come must not have one name.
  std::function<std::string(const std::string& name)> rename = {};
  /// These are merged on the way: a weight comes as weight + scale * up down, of all its adapters, and their matrices do not come. The
  /// model stays as it is. Each rank adds its own part, from whole adapters; sums are computed in fp32 (fp64, if one of the tensors has it)
  /// and rounded once, to the dtype that travels.
  std::vector<WeightAdapter> merge_adapters = {};
  /// Only what is not as it is there comes, as a change of single elements (WeightBucket::changes) where that has fewer bytes, and whole
  /// where not. The snapshot then has what has come.
  std::shared_ptr<WeightSnapshot> since = {};
};

/// New values for some elements of a tensor.
struct WeightChange {
  std::string name;                 ///< The tensor's, as in WeightBucket::weights.
  std::vector<std::int64_t> shape;  ///< Of the whole tensor.
  /// The elements' places in the flattened tensor, each once: 1-D, int32, or int64 for tensors of 2^31 elements and more.
  at::Tensor positions;
  at::Tensor values;  ///< As many, 1-D.
};

/// Whole tensors with their names: views of one buffer, in the order of the model's parameters and then its buffers. All is empty on
/// ranks that do not receive. The memory is the next bucket's when that is asked for, and using the tensors then is an error: clone what is
/// to be kept.
struct WeightBucket {
  std::vector<std::pair<std::string, at::Tensor>> weights;  ///< Names with whole tensors.
  std::vector<WeightChange> changes;                        ///< Of other tensors, with FullWeightsOptions::since.
  at::Tensor flat;                                          ///< The buffer: 1-D, bytes. Each tensor begins at a multiple of 64 bytes.
};

/// A range of buckets, to be gone through once:
///
/// for (const auto& bucket : fsdp::full_weights(*model, {.dtype = torch::kBFloat16})) {
///   for (const auto& [name, weight] : bucket.weights) send(name, weight);
/// }
///
/// While a program has one bucket, the next one is gathered. Memory for two buckets is counted as gathered parameters.
///
/// All ranks take all buckets, or stop. A rank may stop at any time, by destroying the range or by close(): it waits until the others have
/// come to their next bucket, which is then an Error for those that go on, and training can continue. The range must have ended before the
/// model is used again: a forward, a backward or an optimizer's step ends one that was left open, and is an Error.
class FullWeights {
 public:
  /// An input iterator: a bucket lasts until the next one is asked for.
  class iterator {
   public:
    using iterator_category = std::input_iterator_tag;  ///< It can be gone through once.
    using value_type = WeightBucket;                    ///< What it gives.
    using difference_type = std::ptrdiff_t;             ///< As std::iterator_traits asks.
    using pointer = const WeightBucket*;                ///< See operator->().
    using reference = const WeightBucket&;              ///< See operator*().

    iterator() = default;
    /// For the library's own use: takes the first bucket.
    explicit iterator(FullWeights* range) : range_(range) { ++*this; }
    /// The bucket that this rank has now.
    reference operator*() const { return *range_->bucket_; }
    /// The same.
    pointer operator->() const { return &*range_->bucket_; }
    /// Collective. Throws Error if another rank has stopped, and CommError.
    iterator& operator++();
    /// The same.
    void operator++(int) { ++*this; }
    /// True when all buckets have been taken.
    bool operator==(std::default_sentinel_t) const { return range_ == nullptr; }

   private:
    FullWeights* range_ = nullptr;
  };

  /// For the library's own use.
  explicit FullWeights(std::unique_ptr<weights::WeightStream> stream);
  /// As close().
  ~FullWeights();
  /// The range that is left has ended.
  FullWeights(FullWeights&&) noexcept;

  /// Takes the first bucket. Collective; call it once.
  iterator begin() { return iterator(this); }
  /// Compares equal to an iterator when all buckets have been taken.
  std::default_sentinel_t end() const { return {}; }
  /// Ends the range before its end. Collective, as said above.
  void close();
  /// The number of buckets.
  std::size_t size() const;
  /// The part of all elements that differ from FullWeightsOptions::since, from 0 to 1. It is 1 without it, and where all is sent.
  double changed_fraction() const;

 private:
  std::unique_ptr<weights::WeightStream> stream_;
  std::optional<WeightBucket> bucket_;
};

/// Gives the whole main parameters and buffers of a sharded model, bucket by bucket. `module`: the root, or a unit, of which the whole
/// model is given. Tensor-parallel parameters are whole, too. Collective, also over the ranks that have their pieces. Main parameters are
/// read, and nothing is changed: between steps, and between microbatches. Throws Error on every rank if names are unknown, if adapters do
/// not fit their weights, or these are tensor-parallel, if the ranks ask for different things, and inside of a backward.
FullWeights full_weights(torch::nn::Module& module, FullWeightsOptions options = {});

}  // namespace fsdp
