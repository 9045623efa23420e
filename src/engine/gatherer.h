#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <span>
#include <vector>

#include "base/copies.h"
#include "engine/buffer_pools.h"
#include "engine/unit.h"

namespace fsdp::engine {

/// The life of parameters: a unit's shards are all-gathered into a slot, stay there while the unit is used, and are written back, if an
/// operator wrote to them, before the slot is freed. Called under the engine's lock, by Engine and MainParameters.
///
/// A gather takes up to two hops: over the outer ranks, where the optimizer is sharded over them as well, and over the inner ranks.
class Gatherer {
 public:
  /// Units of up to `keep_bytes` together stay gathered after their forward.
  Gatherer(c10::Device device, BufferPools& pools, std::int64_t keep_bytes) : device_(device), pools_(pools), keep_bytes_(keep_bytes) {}

  /// Starts gathering a sharded unit; any other is left alone.
  void start(Unit& unit);
  /// Waits for the gather, which is started if need be.
  void finish(Unit& unit);
  /// Forward has left the unit: it stays if the budget has room for it (true), until unkeep. Else it is freed, but for what its neighbours
  /// keep.
  bool leave_forward(Unit& unit);
  /// Takes a kept unit's bytes from the budget again.
  void unkeep(const Unit& unit) { kept_bytes_ -= unit.full.bytes; }
  /// Writes back and frees, what neighbours keep, too. A gather under way is waited for first.
  void evict(Unit& unit);
  /// Ends a gather under way after a failure; what arrived is not to be trusted.
  void drop(Unit& unit);

  /// What operators wrote to the present parameters reaches the main parameters.
  void write_back(Unit& unit);
  /// The main parameters were written: copies are outdated, and the parameters' versions bumped.
  void outdate_copies(Unit& unit);
  /// As outdate_copies, where the main parameters may have been written or not: graphs of before stay valid.
  void outdate_silently(Unit& unit);
  /// The unit's extension is to make anew what it keeps from one update to the next.
  void renew_extension(Unit& unit);
  /// Starts the hop over the outer dimension that precedes the first gather after an update, where there is one. [Order is collective] All
  /// units start it together after an optimizer step, and one alone after an operator wrote to it.
  void start_shards(Unit& unit);
  /// The caller is about to write the main parameters. A gather of a unit that nothing has used since (predicted in vain, or after an
  /// update) may still send them.
  void stop_sending(Unit& unit);
  /// Gathers replicated main parameters of which every rank has written its own shard.
  void exchange_main(Unit& unit);
  /// See Engine::gather_main.
  std::vector<at::Tensor> gather_main(Unit& unit, std::span<const at::Tensor> main);

 private:
  comm::GatherPart part_to_gather(Unit& unit, std::size_t sub_buffer, Copies& conversions);
  void convert_main(Unit& unit, std::size_t sub_buffer, const at::Tensor& place, Copies& conversions);
  void encode_main(Unit& unit, std::size_t sub_buffer, const at::Tensor& place);
  at::Tensor as_gathered(Unit& unit, std::size_t sub_buffer);
  void begin(Unit& unit, std::vector<comm::GatherPart> parts);
  static void give_up(Unit& unit);
  void finish_shards(Unit& unit);
  static void await_shards(Unit& unit);
  void widen(Unit& unit);
  static void finish_extension(Unit& unit);
  void keep_part(Unit& unit);
  void free(Unit& unit);

  c10::Device device_;
  BufferPools& pools_;
  std::int64_t keep_bytes_;
  std::int64_t kept_bytes_ = 0;
};

}  // namespace fsdp::engine
