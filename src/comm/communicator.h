#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/unit_facts.h"
#include "comm/traffic.h"
#include "fsdp/grad_comm_format.h"

// Collectives over buffers. A communicator knows ranks and bytes, but no parameters or units.
namespace fsdp::comm {

/// The purpose of a collective. Errors name the collective by it, and it must be the same on all ranks.
struct Label {
  const char* operation = "";  ///< "all-gather", "reduce-scatter", ... (a literal)
  std::string_view unit;       ///< Lives as long as the collective is pending.
  std::uint64_t model =
      0;  ///< The number of the model, which is the same on all ranks and distinguishes models with equal units; 0 if there is no model.
  UnitFacts facts = {};
  std::string_view updates = {};  ///< The settings with which optimizers have updated the model. It is read before the call returns.
};

/// Where the buffers of collectives lie.
enum class BufferMemory : std::uint8_t {
  kProcess,    ///< In memory of this process, which other ranks of its host may read.
  kGroup,      ///< In memory of the backend's own allocator, which its collectives need not copy (NCCL's user buffers).
  kSymmetric,  ///< Buffers of gathers lie in torch's symmetric memory, for which NCCL has faster collectives.
};

/// A function that returns memory of this many bytes.
using MemorySource = std::function<c10::DataPtr(std::int64_t bytes)>;

/// One sub-buffer of an all-gather. All 1-D and contiguous; full.numel() == size * shard.numel(). `shard` may be this rank's own
/// region of `full`; otherwise it is copied there. Rank r's shard lands at [r * shard.numel(), (r + 1) * shard.numel()).
struct GatherPart {
  at::Tensor full;
  at::Tensor shard;
};

/// [Rounded once] How the contributions to a sum are rounded before they are sent as messages.
struct Encoding {
  GradCommFormat format;
  /// Chooses, with `reduction_number`, the random numbers of stochastic rounding. Both are the same on all ranks.
  std::uint64_t key = 0;  ///< Another one for each part.
  std::uint64_t reduction_number = 0;
  /// On a device with stochastic rounding, it takes the place of `reduction_number`: int64 without dimensions, which replays of a captured
  /// step count up. Otherwise undefined.
  at::Tensor reduction_number_on_device = {};
  /// With error feedback: fp32, out.numel() elements for each contribution that this rank sends (Traffic::contributions()), in the order of
  /// the receivers. What rounding has lost of those that this rank sent last; the call replaces it. Otherwise undefined.
  at::Tensor lost = {};
};

/// One sub-buffer of a reduce-scatter. `unreduced` has size * out.numel() elements; `staging` has staging_numel(out.numel())
/// elements of unreduced's dtype (undefined if that is 0); `out` may have another dtype. When the collective is done,
/// out = scale * sum over ranks r of (rank r's unreduced)[own region] (added to out's old value if `accumulate`), where the sum runs in
/// fp32 (fp64 for double) pairwise in the order of the ranks, and is then, if `rounded`, rounded to unreduced's dtype. `unreduced` and
/// `staging` must stay alive and untouched until wait() returned. `sum_dtype` is for a communicator whose sums run in the dtype of what it
/// sends: if given, it converts `unreduced` to it first. `gives`, the same on all ranks and in all parts, has the ranks whose gradients
/// count; empty: all. The others count as zero: their `unreduced` has the size and dtype, is not read, and needs no memory. With an
/// `encoding`, the same for all parts except for `key` and `lost`, each contribution that travels as a message is encoded; `staging` then
/// has Traffic::staging_bytes() bytes (kByte), and `unreduced` is not double.
struct ReducePart {
  at::Tensor unreduced;
  at::Tensor staging;
  at::Tensor out;
  bool accumulate = false;
  bool rounded = false;
  std::optional<at::ScalarType> sum_dtype = {};
  std::vector<bool> gives = {};
  std::optional<Encoding> encoding = {};
};

/// One buffer of a scatter, all 1-D and contiguous, of one dtype. `shards`, which only the root reads, has the data for each rank: as many
/// elements as that rank's `into`. Shards may overlap or be the same (a broadcast); the root's `into` may be its shard.
struct ScatterPart {
  std::vector<at::Tensor> shards;
  at::Tensor into;
};

/// One buffer of an uneven gather: bytes, all 1-D and contiguous. `bytes` has the number of bytes of each rank, and is the same on all
/// ranks. A rank that receives gets the bytes of all ranks in `whole`, in the order of the ranks; on the others it is undefined. `own` may
/// be this rank's region of `whole`; otherwise it is copied there.
struct UnevenPart {
  at::Tensor whole;
  at::Tensor own;
  std::vector<std::int64_t> bytes;
};

/// A started collective. wait() blocks the host (Gloo) or the current stream (NCCL) until its results may be read; throws CommError naming
/// operation, unit, rank and c10d's message. Idempotent. Destroying an unfinished one waits and swallows errors: the
/// buffers must not be reused while a peer may still write into them.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void wait() = 0;

  /// The same as wait(), for callers that call Communicator::confirm() before results are used: if a stream waits and not the host, it is
  /// not yet known whether the ranks have made the same call.
  virtual void wait_unconfirmed() { wait(); }
};

/// Bytes this rank sent and operations it started, since construction or reset. The headers by which ranks compare their calls (a few
/// hundred bytes per operation) are not counted.
struct CommStats {
  std::int64_t all_gather_bytes = 0;
  std::int64_t reduce_scatter_bytes = 0;
  std::int64_t scatter_bytes = 0;
  std::int64_t control_bytes = 0;
  std::int64_t control_messages = 0;  ///< The number of messages that carried control_bytes.
  std::int64_t shared_memory_bytes =
      0;  ///< The part of all these bytes that peers read from this rank's memory. The rest was sent as messages.
  std::int64_t all_gathers = 0;
  std::int64_t reduce_scatters = 0;
  std::int64_t scatters = 0;
};

/// The ranks of one mesh row. Every rank must make the same calls in the same order ("Order is collective"): number, label and sizes. Ranks
/// that differ do not get each other's data, and each gets a CommError that prints both sides, at the latest from wait(); with FSDP_DEBUG=1
/// before anything is sent. After a failure, all calls fail on all ranks. Not thread-safe: the engine serializes its calls.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// True for a row of one rank. Its collectives exchange nothing, and only copy between the caller's buffers.
  virtual bool is_alone() const { return size() == 1; }

  /// Elements of staging that a reduce-scatter with out.numel() == shard_numel needs, for any dtype of `unreduced`.
  virtual std::int64_t staging_numel(std::int64_t shard_numel) const = 0;

  /// Elements of staging for one dtype of `unreduced`. The number is never larger, and much smaller for dtypes that NCCL sums by itself.
  virtual std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const { return staging_numel(shard_numel); }

  /// How the collectives of this row move bytes, for plans of it.
  virtual Traffic traffic() const { return Traffic::by_messages(size()); }

  virtual std::unique_ptr<Pending> all_gather(std::span<const GatherPart> parts, const Label& label) = 0;
  virtual std::unique_ptr<Pending> reduce_scatter(std::span<const ReducePart> parts, double scale, const Label& label) = 0;

  /// An all-gather of shards that differ in size, to some ranks: each rank sends its data to every rank whose `receives` is true, and
  /// nothing else. Counted as an all-gather.
  virtual std::unique_ptr<Pending> gather_uneven(std::span<const UnevenPart> parts, const std::vector<bool>& receives,
                                                 const Label& label) = 0;

  /// Rank `root` sends each rank its part.
  virtual std::unique_ptr<Pending> scatter(std::span<const ScatterPart> parts, int root, const Label& label) = 0;

  /// Small host-side exchange: returns a CPU tensor [size, ...] with every rank's `value` (a contiguous CPU tensor of equal shape and
  /// dtype on all ranks), in rank order. Blocks.
  virtual at::Tensor exchange(const at::Tensor& value, const Label& label) = 0;

  /// Returns the text of rank `root` on all ranks; the texts of the others are ignored. Blocks.
  virtual std::string broadcast(const std::string& text, int root, const Label& label) = 0;

  /// Every rank's text, one after the other in rank order, on rank 0; nothing on the others. Blocks.
  virtual std::string gather(const std::string& text, const Label& label) = 0;

  /// Compares a text (model description) across ranks: throws Error on every rank, naming two ranks and the first lines that differ.
  virtual void expect_equal(const std::string& text, const Label& label) = 0;

  virtual void barrier() = 0;

  /// The source of the events of this row's collectives (events/event.h); 0 if they have none.
  virtual std::uint32_t events_source() const { return 0; }

  /// If collectives move data on a device, and the program measures how long they block its stream: records the events of the collectives
  /// that the device has completed (kHeldStream). Does not wait.
  virtual void note_stream_times() {}

  /// Throws CommError if this rank and the one before it in the row have not made the same calls, or if a failure of another rank is known.
  /// Blocks where wait_unconfirmed() has not.
  virtual void confirm() {}

  /// Returns an allocator for this kind of memory, which is not initialised, or an empty function if the backend has none, and for
  /// kProcess. Memory that collectives need beside the caller's buffers also comes from there from now on. Collective: a backend may
  /// connect to its peers first.
  virtual MemorySource use_memory(c10::Device device, BufferMemory memory) { return {}; }

  const CommStats& stats() const { return stats_; }
  void reset_stats() { stats_ = {}; }

 protected:
  CommStats stats_;
};

}  // namespace fsdp::comm
