#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <span>
#include <vector>

#include "base/copies.h"
#include "engine/buffer_pools.h"
#include "engine/step_observer.h"
#include "engine/unit.h"

namespace fsdp::engine {

/// The life of parameters: a unit's shards are all-gathered into a slot, stay there while the unit is used, and are written back, if an
/// operator wrote to them, before the slot is freed. Called under the engine's lock, by Engine and MainParameters.
///
/// A gather takes up to two hops: over the outer ranks, if the optimizer is sharded over them as well, and over the inner ranks.
class Gatherer {
 public:
  /// Units of up to `keep_gathered_bytes` together stay gathered after their forward.
  Gatherer(c10::Device device, BufferPools& pools, std::int64_t keep_gathered_bytes)
      : device_(device), pools_(pools), keep_gathered_bytes_(keep_gathered_bytes) {}

  /// Null if there is no observer.
  void set_observer(StepObserver* observer) { observer_ = observer; }

  /// Starts gathering the unit if it is sharded, and does nothing otherwise. `receives`: which ranks of the row do this; empty: all. The
  /// others call give().
  void start(Unit& unit, const std::vector<bool>& receives = {});
  /// Sends this rank's shard to the ranks of the row that gather the unit, while it stays sharded on this one.
  void give(Unit& unit, const std::vector<bool>& receives);
  /// If the unit's gather needs a hop over the outer ranks first: makes it. Collective over the outer ranks.
  void bring_shards(Unit& unit) {
    if (unit.options.outer_sharded_optimizer) finish_shards(unit);
  }
  /// Waits for the gather, and starts it first if necessary.
  void finish(Unit& unit);
  /// Called when forward has left the unit. If a memory budget keeps it, or keep_gathered_bytes has room for it, it stays gathered until
  /// unkeep, and this returns true. Otherwise it is freed, except for this rank's part of the copy on the post-forward mesh.
  bool leave_forward(Unit& unit);
  /// Subtracts a kept unit's bytes from the sum again.
  void unkeep(const Unit& unit) { kept_bytes_ -= unit.whole.buffer.bytes; }
  /// Writes back what operators wrote, and frees the unit, also on the post-forward mesh. Waits for a gather under way first.
  void evict(Unit& unit);
  /// Ends a gather under way after a failure. The data that arrived are not used.
  void drop(Unit& unit);

  /// Copies what operators wrote to the present parameters to the main parameters.
  void write_back(Unit& unit);
  /// Called after the main parameters were written. Copies become stale, and the parameters' versions are incremented.
  void outdate_copies(Unit& unit);
  /// Does the same as outdate_copies, but leaves the versions unchanged, so that earlier graphs stay valid. For cases in which it is not
  /// known whether the main parameters were written.
  void outdate_silently(Unit& unit);
  /// Makes the unit's extension recompute the values that it keeps from one update to the next.
  void renew_extension(Unit& unit);
  /// Starts the hop over the outer dimension that precedes the first gather after an update, if the unit needs such a hop. [Order is
  /// collective] All units start it together after an optimizer step, and one alone after an operator wrote to it.
  void start_shards(Unit& unit);
  /// Call it before the main parameters are written. It waits for gathers that may still send them: gathers of units that were not used
  /// since (predicted in vain, or started after an update).
  void stop_sending(Unit& unit);
  /// Gathers replicated main parameters of which every rank has written its own shard.
  void exchange_main(Unit& unit);
  /// See MainParameters::gather_main.
  std::vector<at::Tensor> gather_main(Unit& unit, std::span<const at::Tensor> main);

 private:
  comm::GatherPart part_to_gather(Unit& unit, std::size_t sub_buffer, Copies& conversions);
  template <typename Place>
  at::Tensor shard_to_send(Unit& unit, std::size_t sub_buffer, const Place& place, Copies& conversions);
  void convert_main(Unit& unit, std::size_t sub_buffer, const at::Tensor& place, Copies& conversions);
  void encode_main(Unit& unit, std::size_t sub_buffer, const at::Tensor& place);
  at::Tensor as_gathered(Unit& unit, std::size_t sub_buffer);
  void begin(Unit& unit, std::vector<comm::GatherPart> parts, const std::vector<bool>& receives);
  static void give_up(Unit& unit);
  void finish_shards(Unit& unit);
  static void await_shards(Unit& unit);
  void widen(Unit& unit);
  static void finish_extension(Unit& unit);
  void copy_to_post_forward_mesh(Unit& unit);
  void free(Unit& unit);

  c10::Device device_;
  BufferPools& pools_;
  std::int64_t keep_gathered_bytes_;
  std::int64_t kept_bytes_ = 0;
  StepObserver* observer_ = nullptr;
};

}  // namespace fsdp::engine
