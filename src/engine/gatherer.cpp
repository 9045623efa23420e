#include "engine/gatherer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "base/after_error.h"
#include "comm/parts.h"

namespace fsdp::engine {
namespace {

/// A part of a gather from all ranks to some. `full` is undefined on a rank that does not receive.
comm::UnevenPart in_bytes(const at::Tensor& full, const at::Tensor& shard, std::size_t ranks) {
  const auto bytes_of = [](const at::Tensor& tensor) { return comm::flat_view(tensor, 0, tensor.numel()).view(at::kByte); };
  return {.whole = full.defined() ? bytes_of(full) : at::Tensor(),
          .own = bytes_of(shard),
          .bytes = std::vector<std::int64_t>(ranks, static_cast<std::int64_t>(shard.nbytes()))};
}

}  // namespace

void Gatherer::start(Unit& unit, const std::vector<bool>& receives) {
  if (unit.state() != ParameterState::kSharded) return;
  RECORD_USER_SCOPE("FSDP::all_gather (" + unit.name + ")");
  const at::NoGradGuard no_grad;
  std::vector<comm::GatherPart> parts;
  if (unit.whole.extension) parts = unit.whole.extension->start();  // First: if it throws, nothing has begun.
  try {
    begin(unit, std::move(parts), receives);
  } catch (...) {
    give_up(unit);
    throw;
  }
  unit.set_state(ParameterState::kGathering);
}

/// `parts` are those of the unit's extension; the unit's other parts are added to them.
void Gatherer::begin(Unit& unit, std::vector<comm::GatherPart> parts, const std::vector<bool>& receives) {
  if (!unit.replicated_parameters()) unit.whole.buffer.acquire(pools_.of_gathers(), memory::Kind::kGatheredParameters);
  if (unit.whole.post_forward.live()) {
    for (std::size_t k = 0; k < unit.whole.buffer.parts.size(); ++k)
      parts.push_back({.full = unit.whole.buffer.parts[k], .shard = unit.whole.post_forward.parts[k]});
    unit.whole.gather = unit.communicators.post_forward->all_gather(parts, unit.label("all-gather after forward"));
    return;
  }
  unit.whole.wire.acquire(pools_.of_gathers(), memory::Kind::kCommunication);
  bring_shards(unit);
  Copies conversions;
  parts.reserve(parts.size() + unit.whole.buffer.parts.size());
  for (std::size_t k = 0; k < unit.whole.buffer.parts.size(); ++k) {
    if (!unit.formats[k].extended) parts.push_back(part_to_gather(unit, k, conversions));
  }
  conversions.run();
  if (unit.replicated_optimizer()) return;
  if (std::find(receives.begin(), receives.end(), false) == receives.end()) {
    unit.whole.gather = unit.communicators.gather->all_gather(parts, unit.label("all-gather"));
    return;
  }
  std::vector<comm::UnevenPart> uneven;
  for (const auto& part : parts) uneven.push_back(in_bytes(part.full, part.shard, receives.size()));
  unit.whole.gather = unit.communicators.gather->gather_uneven(uneven, receives, unit.label("all-gather"));
}

void Gatherer::give(Unit& unit, const std::vector<bool>& receives) {
  if (unit.replicated_optimizer()) return;
  const at::NoGradGuard no_grad;
  std::vector<comm::UnevenPart> parts;
  std::vector<at::Tensor> shards;
  Copies conversions;
  for (std::size_t k = 0; k < unit.whole.buffer.parts.size(); ++k) {
    const auto place = [&] {
      const auto dtype = unit.formats[k].gather ? at::kByte : unit.formats[k].compute;
      return at::empty({unit.travelling_numel(k) * unit.main_pieces().count}, at::TensorOptions(dtype).device(device_));
    };
    shards.push_back(shard_to_send(unit, k, place, conversions));
  }
  conversions.run();
  for (const auto& shard : shards) parts.push_back(in_bytes({}, shard, receives.size()));
  unit.communicators.gather->gather_uneven(parts, receives, unit.label("all-gather"))->wait_unconfirmed();
}

/// Takes back the memory that begin() gave to a unit that stays sharded because of an exception, such as one from a user's gather format.
void Gatherer::give_up(Unit& unit) {
  unit.whole.wire.release();
  if (unit.options.fixed_addresses) return;
  if (unit.whole.extension) unit.whole.extension->free();
  if (!unit.replicated_parameters()) unit.whole.free();
}

/// Returns the part of the gather for sub-buffer k.
comm::GatherPart Gatherer::part_to_gather(Unit& unit, std::size_t k, Copies& conversions) {
  const at::Tensor& full = unit.format_to_send(k) ? unit.whole.wire.parts[k] : unit.whole.buffer.parts[k];
  const auto place = [&] { return region(full, unit.all_pieces(), unit.main_pieces()); };
  if (unit.main_is_shared(k) && unit.replicated_optimizer()) return {.full = full, .shard = full};
  return {.full = full, .shard = shard_to_send(unit, k, place, conversions)};
}

/// Returns this rank's main parameters of sub-buffer k in the form in which they are sent: where they lie, if possible; otherwise they are
/// converted into `place()`.
template <typename Place>
at::Tensor Gatherer::shard_to_send(Unit& unit, std::size_t k, const Place& place, Copies& conversions) {
  const auto& format = unit.formats[k];
  if (unit.options.outer_sharded_optimizer) return unit.shards.buffer.parts[k];
  if (format.gathers_main() && !unit.offloaded()) return unit.main.parts[k];
  const auto converted = place();
  convert_main(unit, k, converted, conversions);
  return converted;
}

/// Adds to `conversions` the copy of the main parameters of sub-buffer k into `place`, in the form in which they are sent.
void Gatherer::convert_main(Unit& unit, std::size_t k, const at::Tensor& place, Copies& conversions) {
  unit.format_to_send(k) ? encode_main(unit, k, place) : conversions.add(place, unit.main.parts[k]);
}

/// Encodes the main parameters of sub-buffer k, or their difference to the unsharded ones, in its gather format.
void Gatherer::encode_main(Unit& unit, std::size_t k, const at::Tensor& place) {
  if (place.numel() == 0) return;
  const auto pieces = unit.main_pieces().count;
  auto main = unit.main.parts[k].to(device_, /*non_blocking=*/true);
  if (unit.formats[k].sends_differences()) {
    const auto wide = main.to(at::promote_types(main.scalar_type(), at::kFloat));
    main = (wide - region(unit.whole.buffer.parts[k], unit.all_pieces(), unit.main_pieces())).to(at::kFloat);
  }
  unit.formats[k].gather->pre_all_gather(main.view({pieces, -1}), place.view({pieces, -1}));
}

void Gatherer::finish(Unit& unit) {
  start(unit);
  if (unit.state() != ParameterState::kGathering) return;
  if (unit.whole.gather) unit.whole.gather->wait_unconfirmed();
  unit.whole.gather.reset();
  if (unit.whole.post_forward.live()) {
    unit.whole.post_forward.release();
  } else {
    widen(unit);
  }
  finish_extension(unit);
  unit.set_state(ParameterState::kPresent);
}

void Gatherer::finish_extension(Unit& unit) {
  if (!unit.whole.extension) return;
  const at::NoGradGuard no_grad;
  try {
    unit.whole.extension->finish();
  } catch (...) {
    // The data that have arrived are given up. The unit is gathered again when it is next used.
    unit.set_state(ParameterState::kSharded);
    if (!unit.replicated_parameters() && !unit.options.fixed_addresses) unit.whole.free();
    after_error([&] { unit.whole.extension->free(); });
    throw;
  }
}

/// Decodes the data that arrived in a gather format. The unsharded parameters are then those of a gather [Differences need a base].
void Gatherer::widen(Unit& unit) {
  const at::NoGradGuard no_grad;
  const auto pieces = unit.all_pieces().count;
  for (std::size_t k = 0; k < unit.whole.buffer.parts.size(); ++k) {
    const auto* const gather = unit.format_to_send(k);
    const auto& full = unit.whole.buffer.parts[k];
    if (gather != nullptr && full.numel() > 0)
      gather->post_all_gather(unit.whole.wire.parts[k].view({pieces, -1}), full.view({pieces, -1}));
  }
  unit.whole.is_base = true;
  unit.whole.wire.release();
}

bool Gatherer::leave_forward(Unit& unit) {
  const bool has_room = unit.options.kept_by_budget || kept_bytes_ + unit.whole.buffer.bytes <= keep_gathered_bytes_;
  if (!unit.replicated_parameters() && has_room) {
    kept_bytes_ += unit.whole.buffer.bytes;
    return true;
  }
  if (unit.communicators.post_forward && unit.state() == ParameterState::kPresent) copy_to_post_forward_mesh(unit);
  free(unit);
  return false;
}

/// Fills this rank's part of the copy.
void Gatherer::copy_to_post_forward_mesh(Unit& unit) {
  const auto& neighbours = unit.communicators.post_forward;
  write_back(unit);
  unit.whole.post_forward.acquire(pools_.of_gathers(), memory::Kind::kGatheredParameters);
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < unit.whole.buffer.parts.size(); ++k) {
    const auto& full = unit.whole.buffer.parts[k];
    unit.whole.post_forward.parts[k].copy_(region(full, {0, neighbours->size()}, {neighbours->rank(), 1}));
  }
}

void Gatherer::evict(Unit& unit) {
  free(unit);
  unit.whole.post_forward.release();
}

/// Writes back and frees the unsharded parameters.
void Gatherer::free(Unit& unit) {
  if (unit.state() == ParameterState::kSharded) return;
  if (unit.state() == ParameterState::kGathering) finish(unit);
  if (observer_ != nullptr) observer_->frees(unit);
  write_back(unit);
  if (unit.replicated_parameters()) return;
  unit.set_state(ParameterState::kSharded);
  if (unit.options.fixed_addresses) return;
  unit.whole.free();
  if (unit.whole.extension) unit.whole.extension->free();
}

void Gatherer::drop(Unit& unit) {
  if (unit.state() != ParameterState::kGathering) return;
  unit.whole.gather.reset();  // waits; a failed peer's error was reported where it was first seen
  unit.whole.wire.release();
  unit.set_state(unit.replicated_parameters() ? ParameterState::kSharded : ParameterState::kPresent);
}

void Gatherer::write_back(Unit& unit) {
  if (!std::exchange(unit.whole.written, false)) return;
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < unit.main.parts.size(); ++k) {
    if (unit.replicated_parameters() && unit.main_is_shared(k)) continue;
    const auto written = region(unit.whole.buffer.parts[k], unit.all_pieces(), unit.main_pieces());
    if (unit.formats[k].gathers_main()) {
      unit.main.parts[k].copy_(written);
      continue;
    }
    // Where the operator changed nothing, the main parameters keep the precision that the unsharded parameters do not have.
    const auto before = as_gathered(unit, k);
    const auto main = unit.main.parts[k].to(device_);
    unit.main.parts[k].copy_(at::where(written == before, main, written.to(main.scalar_type())));
  }
  unit.shards.outdated = unit.options.outer_sharded_optimizer;
}

/// Returns the values that a gather would give for this rank's main parameters of sub-buffer k.
at::Tensor Gatherer::as_gathered(Unit& unit, std::size_t k) {
  const auto& format = unit.formats[k];
  if (!format.gather) return unit.main.parts[k].to(device_).to(format.compute);
  const auto pieces = unit.main_pieces().count;
  const auto gathered = at::empty({unit.main.parts[k].numel()}, unit.whole.buffer.parts[k].options());
  if (gathered.numel() == 0) return gathered;
  const auto wire = at::empty({unit.travelling_numel(k) * pieces}, gathered.options().dtype(at::kByte));
  encode_main(unit, k, wire);
  format.gather->post_all_gather(wire.view({pieces, -1}), gathered.view({pieces, -1}));
  return gathered;
}

void Gatherer::start_shards(Unit& unit) {
  if (!unit.shards.outdated) return;
  unit.shards.gather.reset();
  std::vector<comm::GatherPart> parts;
  Copies conversions;
  for (std::size_t k = 0; k < unit.main.parts.size(); ++k) {
    const auto own = region(unit.shards.buffer.parts[k], unit.inner_pieces(), unit.main_pieces());
    if (!unit.main_is_shared(k)) convert_main(unit, k, own, conversions);
    parts.push_back({.full = unit.shards.buffer.parts[k], .shard = own});
  }
  conversions.run();
  unit.shards.gather = unit.communicators.outer->all_gather(parts, unit.label("outer all-gather"));
  unit.shards.outdated = false;  // Only now, because a hop that could not be started must still be done.
}

void Gatherer::finish_shards(Unit& unit) {
  start_shards(unit);
  await_shards(unit);
}

void Gatherer::await_shards(Unit& unit) {
  if (!unit.shards.gather) return;
  unit.shards.gather->wait_unconfirmed();
  unit.shards.gather.reset();
}

void Gatherer::stop_sending(Unit& unit) {
  if (unit.state() == ParameterState::kGathering) finish(unit);
  await_shards(unit);
}

void Gatherer::outdate_copies(Unit& unit) {
  unit.whole.written = false;
  unit.whole.last_backward = LastBackward::kNone;
  outdate_silently(unit);
  for (const auto& parameter : unit.parameters) {
    if (const auto tensor = parameter.tensor.lock()) tensor->bump_version();  // [Stale graphs fail]
  }
}

void Gatherer::outdate_silently(Unit& unit) {
  evict(unit);
  // Replicated parameters are not freed. They are stale if another rank may own the change, or if the main parameters are separate.
  if (unit.replicated_parameters() && (!unit.replicated_optimizer() || unit.has_separate_main())) unit.set_state(ParameterState::kSharded);
  unit.shards.outdated = unit.options.outer_sharded_optimizer;
}

// The tensor that stands for an extended parameter is in no graph. By its version, the extension notices that the main parameters have
// changed.
void Gatherer::renew_extension(Unit& unit) {
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    if (!unit.formats[unit.layout.positions()[i].sub_buffer].extended) continue;
    if (const auto tensor = unit.parameters[i].tensor.lock()) tensor->bump_version();
  }
}

void Gatherer::exchange_main(Unit& unit) {
  std::vector<comm::GatherPart> parts;
  for (const auto& main : unit.main.parts) {
    const auto whole = main.to(device_);  // itself, unless it is offloaded
    parts.push_back({.full = whole, .shard = unit.main_region(whole, unit.inner_pieces())});
  }
  unit.communicators.gather->all_gather(parts, unit.label("all-gather of shards"))->wait();
  for (std::size_t k = 0; k < parts.size(); ++k) unit.main.parts[k].copy_(parts[k].full);
}

std::vector<at::Tensor> Gatherer::gather_main(Unit& unit, std::span<const at::Tensor> main) {
  std::vector<at::Tensor> whole;
  std::vector<comm::GatherPart> outer;
  std::vector<comm::GatherPart> inner;
  for (const auto& part : main) {
    const auto numel = part.numel() / unit.main_pieces().count * unit.all_pieces().count;
    const auto& full = whole.emplace_back(at::empty({numel}, part.options().device(device_)));
    const auto own = region(full, unit.all_pieces(), unit.main_pieces());
    const auto shard = region(full, unit.all_pieces(), unit.inner_pieces());
    own.copy_(part);
    outer.push_back({.full = shard, .shard = own});
    inner.push_back({.full = full, .shard = shard});
  }
  const auto label = unit.label("all-gather of main parameters or gradients");
  if (unit.options.outer_sharded_optimizer) unit.communicators.outer->all_gather(outer, label)->wait();
  if (!unit.replicated_optimizer()) unit.communicators.gather->all_gather(inner, label)->wait();
  return whole;
}

}  // namespace fsdp::engine
