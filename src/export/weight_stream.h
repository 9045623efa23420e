#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/mesh/ranks.h"
#include "engine/engine.h"
#include "export/adapters.h"
#include "export/route.h"
#include "export/weight_changes.h"
#include "export/weight_entry.h"
#include "fsdp/device_mesh.h"
#include "fsdp/full_weights.h"

// The namespace is not called as the folder is, because `export` is a keyword.
namespace fsdp::weights {

struct Request {
  std::vector<std::shared_ptr<engine::Engine>> engines;  ///< The engines of the entries.
  /// Meshes whose dimensions together, the outermost first, have all ranks. Empty: the dimensions of the first engine's mesh.
  std::vector<DeviceMesh> meshes;
  std::vector<Entry> entries;
  std::vector<Entry> factors =
      {};  ///< The factors of the products that are added to entries: thin matrices, which the consumer does not get.
  FullWeightsOptions options;
  std::string problem;  ///< Why this rank cannot export, as the text of an Error; empty if it can.
};

/// The state of a stream of weights. Transitions:
///   kOpen -> kEnded   the last bucket was given
///   kOpen -> kClosed  by close(), by a use of the model, or because another rank has closed it
///   kOpen -> kFailed  a collective failed
enum class StreamState : std::uint8_t { kOpen, kEnded, kClosed, kFailed };

/// Gathers entries in buckets, one ahead of the one that the consumer has.
///
/// [Note: Nobody waits for a consumer that has stopped] Before the gather of a bucket starts, the ranks exchange whether they continue (one
/// small exchange). A rank that stops early reports it in the next exchange, which all others reach when they request their next bucket,
/// stop too, or use the model again. After an exchange in which some rank has stopped, no gather starts on any rank. All ranks are then at
/// the same collective, and training can continue. One more exchange, without a gather, precedes the last bucket.
///
/// [Note: The weights of one moment] A write to main parameters through the engine or an optimizer ends the stream, and is an Error in the
/// writer. Other writes increment version counters. Each rank compares these before an exchange, when the previous gather has ended, so
/// that no rank returns a bucket that was gathered after a write.
///
/// Its methods are collective, and not thread-safe. The consumer's thread makes all calls to the communicators, under the engine's lock.
class WeightStream {
 public:
  /// Starts the first gather. Throws Error on every rank if one of them has a problem, or if their requests differ.
  explicit WeightStream(Request request);
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  /// Returns the next bucket; nothing after the last one. Its tensors lose their memory with the next call: using them later is an error.
  /// Empty on ranks that do not receive. Throws Error if another rank has stopped, and CommError.
  std::optional<WeightBucket> next();
  /// Ends the stream on this rank; see the note. Does nothing after its end.
  void close();

  std::size_t buckets() const { return buckets_.size(); }
  /// See FullWeights::changed_fraction.
  double changed_fraction() const { return changed_fraction_; }
  StreamState state() const { return state_; }

 private:
  /// An entry in its bucket. This rank holds the complete tensor if it receives, and otherwise the part that it sends.
  struct Place {
    std::size_t entry = 0;
    at::ScalarType dtype = at::kFloat;  ///< The dtype in which it is sent.
    const Route* route = nullptr;       ///< Null for an entry that is not cut.
    std::vector<Range>
        ranges;  ///< The ranges that this rank owns, and has after each gather, in the bucket's buffer; the last is the complete tensor.
    std::vector<std::vector<std::int64_t>> bytes;  ///< The contributions of the ranks of each row, by row and rank.
  };
  struct BucketPlan {
    std::vector<Place> places;
    std::int64_t bytes = 0;  ///< The bytes that this rank holds.
    std::string label;
  };
  /// Memory for one bucket, and the tensor over it that is given to the consumer.
  struct Buffer {
    c10::DataPtr memory;
    at::Tensor bytes;
  };
  /// A bucket whose gather has started.
  struct Flight {
    const BucketPlan* plan = nullptr;
    Buffer buffer;
    std::vector<std::unique_ptr<comm::Pending>> pending;  // after the buffer: destroying one waits
  };
  /// A tensor of the model, and its version when the stream began.
  struct Watched {
    explicit Watched(const Entry& entry);
    std::uint64_t now() const;

    std::string name;
    c10::VariableVersion own;
    c10::VariableVersion wrapper;
    std::uint64_t version;
  };
  /// The state of a rank, which ranks exchange before a bucket.
  enum class Says : std::uint8_t { kGoesOn, kStops, kHasFailed };
  struct Said {
    std::int64_t rank = 0;  ///< The global one.
    Says says = Says::kGoesOn;
  };

  void check(Request& request);
  void choose_receivers(WeightReceivers receivers);
  void on_all(const std::function<void()>& work) const;
  void keep_changes(const FullWeightsOptions& options);
  Counts exchange(const std::vector<Entry>& entries, const std::vector<std::int64_t>& changed);
  void plan(std::int64_t bucket_bytes, std::optional<at::ScalarType> dtype);
  Place place(std::size_t entry, Course course, at::ScalarType dtype, std::int64_t begin) const;
  void start();
  void go_on(const BucketPlan& bucket, const std::function<void()>& work) const;
  void refuse_writes() const;
  std::vector<const Entry*> merged(const BucketPlan& bucket) const;
  Buffer take_buffer(std::int64_t bytes);
  static void detach(Buffer& buffer);
  bool is_gathered_straight(const Place& place) const;
  void fill(const BucketPlan& bucket, const at::Tensor& buffer) const;
  void gather(Flight& flight) const;
  WeightBucket arrived(const BucketPlan& bucket, const at::Tensor& buffer) const;
  at::Tensor whole(const Place& place, const at::Tensor& buffer) const;
  void put_in_order(const Entry& entry, const at::Tensor& values) const;
  std::vector<Said> tell(Says says) const;
  std::string end();
  void stop(Says says);
  void count(std::int64_t bytes);
  void forget(StreamState state);
  void release_engines();

  std::vector<std::shared_ptr<engine::Engine>> engines_;
  std::vector<Entry> entries_;
  std::vector<Watched> watched_;  ///< The entries and factors, except those of which the stream has copied the data that it sends.
  Adapters adapters_;
  std::shared_ptr<WeightSnapshot> since_;  ///< Or null.
  double changed_fraction_ = 1;
  comm::Ranks ranks_;
  std::optional<Routes> routes_;  ///< None before the receivers are known.
  bool receives_ = true;
  std::vector<BucketPlan> buckets_;
  std::int64_t capacity_ = 0;  ///< The size of a buffer, which fits every bucket.
  std::size_t next_ = 0;       ///< The bucket whose gather starts next; past the number of buckets when the last exchange is over.
  Flight ahead_;
  Buffer given_;                    ///< The buffer of the bucket that the consumer has.
  c10::DataPtr spare_;              ///< Memory for a bucket, not in use.
  std::int64_t counted_bytes_ = 0;  ///< The size of all this memory, in the accounting of the first engine.
  StreamState state_ = StreamState::kOpen;
  bool is_known_ = false;  ///< Whether the engines know the stream, and end it if the model is used.
};

}  // namespace fsdp::weights
