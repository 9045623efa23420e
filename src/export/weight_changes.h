#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "export/adapters.h"
#include "export/weight_entry.h"
#include "fsdp/full_weights.h"

namespace fsdp::weights {

/// Whether a snapshot has the values of all receivers. Transitions:
///   kUnknown, kKnown -> kMoving   a stream has begun, and the snapshot gets its values
///   kMoving -> kKnown             the stream has come to its end
///   kMoving -> kUnknown           it has not: by close(), by a failure, or because another rank has stopped
enum class SnapshotState : std::uint8_t { kUnknown, kMoving, kKnown };

/// The contents of a WeightSnapshot.
struct SavedWeights {
  std::optional<at::Device> device;
  std::string id;                  ///< The same on all ranks, and unique for each snapshot. Empty before the first stream.
  std::int64_t streams = 0;        ///< How many have begun.
  std::int64_t last_run = 0;       ///< Of a plan's runs: the number of the last one that had it. Receivers have its values until the next.
  std::vector<std::string> form;   ///< The facts that must not change from stream to stream, a line each.
  std::vector<at::Tensor> shards;  ///< By entry, 1-D; empty where this rank sends nothing.
  SnapshotState state = SnapshotState::kUnknown;
};

/// How many elements have changed, by entry.
struct Counts {
  std::vector<std::vector<std::int64_t>> of_pieces;  ///< As Changed::numel_of_piece.
  std::vector<std::vector<std::int64_t>> of_ranks;   ///< As Changed::numel_of_rank.
  std::vector<std::int64_t> largest;                 ///< The most that a rank would receive.
};

/// Compares shards with a snapshot, and updates it. It needs no other ranks.
class Comparison {
 public:
  /// `dtype`: see travelling_dtype. `receives`: whether this rank receives, and therefore needs tensors that are complete on it.
  /// `everything`: no element counts as known. `adapters`: holds the factors of all entries.
  Comparison(std::vector<Entry> entries, SavedWeights& saved, std::optional<at::ScalarType> dtype, bool receives, bool everything,
             const Adapters& adapters);

  const std::vector<Entry>& entries() const { return entries_; }
  /// The changed elements of this rank's shards, by entry.
  std::vector<std::int64_t> count() const;
  /// Returns the entries to send: none for a tensor that has not changed, its positions and its values if these have fewer bytes, and
  /// otherwise the complete tensor, read from the snapshot. The snapshot then has their values.
  std::vector<Entry> take(const Counts& counts);
  /// The fraction of all elements that has changed.
  double fraction(const Counts& counts) const;

 private:
  at::Tensor now(std::size_t entry) const;
  void take_changes(std::size_t entry, const Counts& counts, std::vector<Entry>& taken);
  bool is_sent(const Entry& entry) const { return receives_ || entry.is_cut(); }

  std::vector<Entry> entries_;
  SavedWeights& saved_;
  std::optional<at::ScalarType> dtype_;
  bool receives_;
  bool everything_;
  const Adapters& adapters_;
};

/// A 1-D tensor's bits as integers, of which a copy and a comparison know no NaN and no sign of zero. Elements of 16 bytes are rows of two.
at::Tensor bits(const at::Tensor& values);
/// Returns which elements have other bits than the saved ones: bool, 1-D. Both are 1-D; `saved` may be on another device.
at::Tensor changed_elements(const at::Tensor& values, const at::Tensor& saved);
/// Copies the values to `saved`, 1-D, on `device`, or where they are.
void save_values(const at::Tensor& values, at::Tensor& saved, std::optional<at::Device> device);
/// "all", "the first" or "one per host".
const char* name_of(WeightReceivers receivers);
/// Returns the facts that a snapshot's streams must have in common, a line each.
std::vector<std::string> form_of(const std::vector<Entry>& entries, const FullWeightsOptions& options);
/// Throws Error if a snapshot is in use, or was made by streams of another form.
void check_snapshot(const SavedWeights& saved, const std::vector<std::string>& form);
/// Returns a text that identifies the snapshot, so that ranks with different ones notice this.
std::string text_of_snapshot(const SavedWeights& saved);

}  // namespace fsdp::weights
