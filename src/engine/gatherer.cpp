#include "engine/gatherer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <utility>

#include "base/after_error.h"

namespace fsdp::engine {

void Gatherer::start(Unit& unit) {
  if (unit.state() != ParameterState::kSharded) return;
  RECORD_USER_SCOPE("FSDP::all_gather (" + unit.name + ")");
  const at::NoGradGuard no_grad;
  std::vector<comm::GatherPart> parts;
  if (unit.extension) parts = unit.extension->start();  // First: if it throws, nothing has begun.
  try {
    begin(unit, std::move(parts));
  } catch (...) {
    give_up(unit);
    throw;
  }
  unit.set_state(ParameterState::kGathering);
}

/// `parts` are those of the unit's extension; the unit's other parts are added to them.
void Gatherer::begin(Unit& unit, std::vector<comm::GatherPart> parts) {
  if (!unit.replicated_parameters()) unit.full.acquire(pools_.of_gathers(), memory::Kind::kGatheredParameters);
  if (unit.post_forward.live()) {
    for (std::size_t k = 0; k < unit.full.parts.size(); ++k)
      parts.push_back({.full = unit.full.parts[k], .shard = unit.post_forward.parts[k]});
    unit.gather = unit.communicators.post_forward->all_gather(parts, unit.label("all-gather after forward"));
    return;
  }
  unit.wire.acquire(pools_.of_gathers(), memory::Kind::kCommunication);
  if (unit.options.outer_sharded_optimizer) finish_shards(unit);
  Copies conversions;
  for (std::size_t k = 0; k < unit.full.parts.size(); ++k) {
    if (!unit.formats[k].extended) parts.push_back(part_to_gather(unit, k, conversions));
  }
  conversions.run();
  if (!unit.replicated_optimizer()) unit.gather = unit.communicators.gather->all_gather(parts, unit.label("all-gather"));
}

/// Takes back the memory that begin() gave to a unit that stays sharded because of an exception, such as one from a user's gather format.
void Gatherer::give_up(Unit& unit) {
  unit.wire.release();
  if (unit.options.keeps_storage) return;
  if (unit.extension) unit.extension->free();
  if (!unit.replicated_parameters()) unit.free_whole();
}

/// Returns the part of the gather for sub-buffer k. This rank's main parameters are sent directly if possible; otherwise they are converted
/// into their place in the gathered buffer.
comm::GatherPart Gatherer::part_to_gather(Unit& unit, std::size_t k, Copies& conversions) {
  const auto& format = unit.formats[k];
  const at::Tensor& full = format.gather ? unit.wire.parts[k] : unit.full.parts[k];
  if (unit.options.outer_sharded_optimizer) return {.full = full, .shard = unit.shards.parts[k]};
  if (unit.main_is_shared(k) && unit.replicated_optimizer()) return {.full = full, .shard = full};
  if (format.gathers_main() && !unit.offloaded()) return {.full = full, .shard = unit.main[k]};
  const auto place = Unit::region(full, unit.all_pieces(), unit.main_pieces());
  convert_main(unit, k, place, conversions);
  return {.full = full, .shard = place};
}

/// Adds to `conversions` the copy of the main parameters of sub-buffer k into `place`, in the form in which they are sent.
void Gatherer::convert_main(Unit& unit, std::size_t k, const at::Tensor& place, Copies& conversions) {
  unit.formats[k].gather ? encode_main(unit, k, place) : conversions.add(place, unit.main[k]);
}

/// Encodes the main parameters of sub-buffer k in its gather format.
void Gatherer::encode_main(Unit& unit, std::size_t k, const at::Tensor& place) {
  if (place.numel() == 0) return;
  const auto pieces = unit.main_pieces().count;
  const auto main = unit.main[k].to(device_, /*non_blocking=*/true);
  unit.formats[k].gather->pre_all_gather(main.view({pieces, -1}), place.view({pieces, -1}));
}

void Gatherer::finish(Unit& unit) {
  start(unit);
  if (unit.state() != ParameterState::kGathering) return;
  if (unit.gather) unit.gather->wait_unconfirmed();
  unit.gather.reset();
  if (unit.post_forward.live()) {
    unit.post_forward.release();
  } else {
    widen(unit);
  }
  finish_extension(unit);
  unit.set_state(ParameterState::kPresent);
}

void Gatherer::finish_extension(Unit& unit) {
  if (!unit.extension) return;
  const at::NoGradGuard no_grad;
  try {
    unit.extension->finish();
  } catch (...) {
    // The data that have arrived are given up. The unit is gathered again when it is next used.
    unit.set_state(ParameterState::kSharded);
    if (!unit.replicated_parameters() && !unit.options.keeps_storage) unit.free_whole();
    after_error([&] { unit.extension->free(); });
    throw;
  }
}

/// Decodes the data that arrived in a gather format.
void Gatherer::widen(Unit& unit) {
  const at::NoGradGuard no_grad;
  const auto pieces = unit.all_pieces().count;
  for (std::size_t k = 0; k < unit.full.parts.size(); ++k) {
    const auto& gather = unit.formats[k].gather;
    const auto& full = unit.full.parts[k];
    if (gather && full.numel() > 0) gather->post_all_gather(unit.wire.parts[k].view({pieces, -1}), full.view({pieces, -1}));
  }
  unit.wire.release();
}

bool Gatherer::leave_forward(Unit& unit) {
  if (!unit.replicated_parameters() && kept_bytes_ + unit.full.bytes <= keep_bytes_) {
    kept_bytes_ += unit.full.bytes;
    return true;
  }
  if (unit.communicators.post_forward && unit.state() == ParameterState::kPresent) keep_part(unit);
  free(unit);
  return false;
}

/// This rank's part of the copy that neighbours keep between them after forward.
void Gatherer::keep_part(Unit& unit) {
  const auto& neighbours = unit.communicators.post_forward;
  write_back(unit);
  unit.post_forward.acquire(pools_.of_gathers(), memory::Kind::kGatheredParameters);
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < unit.full.parts.size(); ++k) {
    const auto& full = unit.full.parts[k];
    unit.post_forward.parts[k].copy_(Unit::region(full, {0, neighbours->size()}, {neighbours->rank(), 1}));
  }
}

void Gatherer::evict(Unit& unit) {
  free(unit);
  unit.post_forward.release();
}

/// Writes back and frees the whole parameters.
void Gatherer::free(Unit& unit) {
  if (unit.state() == ParameterState::kSharded) return;
  if (unit.state() == ParameterState::kGathering) finish(unit);
  write_back(unit);
  if (unit.replicated_parameters()) return;
  unit.set_state(ParameterState::kSharded);
  if (unit.options.keeps_storage) return;
  unit.free_whole();
  if (unit.extension) unit.extension->free();
}

void Gatherer::drop(Unit& unit) {
  if (unit.state() != ParameterState::kGathering) return;
  unit.gather.reset();  // waits; a failed peer's error was reported where it was first seen
  unit.wire.release();
  unit.set_state(unit.replicated_parameters() ? ParameterState::kSharded : ParameterState::kPresent);
}

void Gatherer::write_back(Unit& unit) {
  if (!std::exchange(unit.written, false)) return;
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < unit.main.size(); ++k) {
    if (unit.replicated_parameters() && unit.main_is_shared(k)) continue;
    const auto written = Unit::region(unit.full.parts[k], unit.all_pieces(), unit.main_pieces());
    if (unit.formats[k].gathers_main()) {
      unit.main[k].copy_(written);
      continue;
    }
    // Where the operator changed nothing, the main parameters keep the precision that the whole parameters do not have.
    const auto before = as_gathered(unit, k);
    const auto main = unit.main[k].to(device_);
    unit.main[k].copy_(at::where(written == before, main, written.to(main.scalar_type())));
  }
  unit.shards_outdated = unit.options.outer_sharded_optimizer;
}

/// Returns the values that a gather would give for this rank's main parameters of sub-buffer k.
at::Tensor Gatherer::as_gathered(Unit& unit, std::size_t k) {
  const auto& format = unit.formats[k];
  if (!format.gather) return unit.main[k].to(device_).to(format.compute);
  const auto pieces = unit.main_pieces().count;
  const auto gathered = at::empty({unit.main[k].numel()}, unit.full.parts[k].options());
  if (gathered.numel() == 0) return gathered;
  const auto wire = at::empty({unit.travelling_numel(k) * pieces}, gathered.options().dtype(at::kByte));
  encode_main(unit, k, wire);
  format.gather->post_all_gather(wire.view({pieces, -1}), gathered.view({pieces, -1}));
  return gathered;
}

void Gatherer::start_shards(Unit& unit) {
  if (!unit.shards_outdated) return;
  unit.shards_gather.reset();
  std::vector<comm::GatherPart> parts;
  Copies conversions;
  for (std::size_t k = 0; k < unit.main.size(); ++k) {
    const auto own = Unit::region(unit.shards.parts[k], unit.inner_pieces(), unit.main_pieces());
    if (!unit.main_is_shared(k)) convert_main(unit, k, own, conversions);
    parts.push_back({.full = unit.shards.parts[k], .shard = own});
  }
  conversions.run();
  unit.shards_gather = unit.communicators.outer->all_gather(parts, unit.label("outer all-gather"));
  unit.shards_outdated = false;  // Only now, because a hop that could not be started must still be done.
}

void Gatherer::finish_shards(Unit& unit) {
  start_shards(unit);
  await_shards(unit);
}

void Gatherer::await_shards(Unit& unit) {
  if (!unit.shards_gather) return;
  unit.shards_gather->wait_unconfirmed();
  unit.shards_gather.reset();
}

void Gatherer::stop_sending(Unit& unit) {
  if (unit.state() == ParameterState::kGathering) finish(unit);
  await_shards(unit);
}

void Gatherer::outdate_copies(Unit& unit) {
  unit.written = false;
  unit.last_backward = LastBackward::kNone;
  outdate_silently(unit);
  for (const auto& parameter : unit.parameters) {
    if (const auto tensor = parameter.tensor.lock()) tensor->bump_version();  // [Stale graphs fail]
  }
}

void Gatherer::outdate_silently(Unit& unit) {
  evict(unit);
  // Replicated parameters are not freed. They are outdated if another rank may own the change, or if the main parameters are separate.
  if (unit.replicated_parameters() && (!unit.replicated_optimizer() || unit.has_separate_main())) unit.set_state(ParameterState::kSharded);
  unit.shards_outdated = unit.options.outer_sharded_optimizer;
}

// The tensor that stands for an extended parameter is in no graph. Its version tells the extension that the main parameters have changed.
void Gatherer::renew_extension(Unit& unit) {
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    if (!unit.formats[unit.layout.placements()[i].sub_buffer].extended) continue;
    if (const auto tensor = unit.parameters[i].tensor.lock()) tensor->bump_version();
  }
}

void Gatherer::exchange_main(Unit& unit) {
  std::vector<comm::GatherPart> parts;
  for (const auto& main : unit.main) {
    const auto whole = main.to(device_);  // itself, unless it is offloaded
    parts.push_back({.full = whole, .shard = unit.main_region(whole, unit.inner_pieces())});
  }
  unit.communicators.gather->all_gather(parts, unit.label("all-gather of shards"))->wait();
  for (std::size_t k = 0; k < parts.size(); ++k) unit.main[k].copy_(parts[k].full);
}

std::vector<at::Tensor> Gatherer::gather_main(Unit& unit, std::span<const at::Tensor> main) {
  std::vector<at::Tensor> whole;
  std::vector<comm::GatherPart> outer;
  std::vector<comm::GatherPart> inner;
  for (const auto& part : main) {
    const auto numel = part.numel() / unit.main_pieces().count * unit.all_pieces().count;
    const auto& full = whole.emplace_back(at::empty({numel}, part.options().device(device_)));
    const auto own = Unit::region(full, unit.all_pieces(), unit.main_pieces());
    const auto shard = Unit::region(full, unit.all_pieces(), unit.inner_pieces());
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
