#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <utility>

#include "base/copies.h"
#include "base/stable_hash.h"
#include "comm/call.h"
#include "engine/reducer.h"

// A reduction, hop by hop: Reducer's functions that start and complete one.
namespace fsdp::engine {

void Reducer::start(Reduction& reduction) {
  switch (reduction.hop) {
    case Hop::kInnerReduce:
      reduction.pending = reduce_over_inner_ranks(*reduction.gradients, reduction.in_place);
      break;
    case Hop::kOuterReduce:
      reduction.pending = reduce_over_outer_ranks(*reduction.gradients);
      break;
    case Hop::kOuterGather:
      reduction.pending = gather_over_outer_ranks(*reduction.gradients);
      break;
    case Hop::kInnerGather:
      reduction.pending = gather_over_inner_ranks(*reduction.gradients);
      break;
  }
}

namespace {

/// Two parts of the main gradients of sub-buffer k, or of the buffer that becomes them: the piece of this rank, and the pieces of this
/// inner rank.
at::Tensor own_piece(const GradientAccumulator& gradients, std::size_t k) {
  return gradients.unit.main_region(gradients.reduced[k], gradients.unit.own_pieces());
}
at::Tensor inner_region(const GradientAccumulator& gradients, std::size_t k) {
  return gradients.unit.main_region(gradients.reduced[k], gradients.unit.inner_pieces());
}

}  // namespace

/// [Rounded once] How this hop encodes contributions for shards of sub-buffer k. The key depends on nothing that the moment of the
/// reduction or its place among others changes.
std::optional<comm::Encoding> Reducer::encoding(const GradientAccumulator& gradients, std::size_t k, std::int64_t shard_numel, Hop hop,
                                                LostByRounding& lost) const {
  const Unit& unit = gradients.unit;
  const auto& format = unit.options.grad_comm_format;
  const auto& ranks = hop == Hop::kInnerReduce ? *unit.communicators.reduce : *unit.communicators.outer;
  const std::int64_t contributions = ranks.traffic().contributions();
  if (!format || contributions == 0) return std::nullopt;
  std::uint64_t key = mix(stable_hash(unit.name), format->seed);
  for (const std::uint64_t part : {std::uint64_t{k}, static_cast<std::uint64_t>(hop)}) key = mix(key, part);
  comm::Encoding encoding{.format = *format,
                          .key = key,
                          .reduction_number = gradients.reductions,
                          .reduction_number_on_device = gradients.reductions_on_device};
  if (!format->error_feedback) return encoding;
  lost.parts.resize(unit.layout.trainable_sub_buffers());
  if (!lost.parts[k].defined()) {
    lost.parts[k] = at::zeros({contributions * shard_numel}, at::TensorOptions(at::kFloat).device(device_));
    const auto bytes = static_cast<std::int64_t>(lost.parts[k].nbytes());
    lost.bytes += bytes;
    accounting_.add(memory::Kind::kCommunication, bytes);
  }
  encoding.lost = lost.parts[k];
  return encoding;
}

void Reducer::forget_lost(GradientAccumulator& gradients) {
  for (auto* lost : {&gradients.lost, &gradients.partial.lost}) {
    accounting_.remove(memory::Kind::kCommunication, std::exchange(*lost, {}).bytes);
  }
}

/// Reduces the unreduced gradients into the main gradients or, if there are outer ranks, into `partial`. With `in_place`, the result goes
/// into this rank's region of the unreduced gradients.
std::unique_ptr<comm::Pending> Reducer::reduce_over_inner_ranks(GradientAccumulator& gradients, bool in_place) {
  const Unit& unit = gradients.unit;
  RECORD_USER_SCOPE("FSDP::post_backward_reduce (" + unit.name + ")");
  const bool has_outer = unit.communicators.outer != nullptr;
  const bool accumulate = has_outer ? gradients.partial.is_held : gradients.valid;
  if (has_outer) {
    gradients.partial.buffer.acquire(pool_, memory::Kind::kUnreducedGradients);
  } else if (!in_place) {
    allocate_reduced(gradients);
  }
  gradients.receives().acquire(pool_, memory::Kind::kCommunication);
  ++gradients.reductions;
  if (gradients.reductions_on_device.defined()) gradients.reductions_on_device.add_(1);
  std::vector<comm::ReducePart> parts;
  parts.reserve(gradients.sub_buffers.size());
  for (const auto k : gradients.sub_buffers) {
    const auto unreduced = gradients.unreduced(k);
    const auto wire_dtype = unit.formats[k].wire_gradient;
    parts.push_back({.unreduced = unreduced,
                     .staging = gradients.receives().parts[k],
                     .out = has_outer  ? gradients.partial_shards(k)
                            : in_place ? region(unreduced, unit.all_pieces(), unit.inner_pieces())
                                       : inner_region(gradients, k),
                     .accumulate = accumulate,
                     .rounded = !has_outer && unit.formats[k].rounds_sums && unreduced.scalar_type() == wire_dtype,
                     .sum_dtype = wire_dtype,
                     .gives = gradients.gives});
    parts.back().encoding = encoding(gradients, k, parts.back().out.numel(), Hop::kInnerReduce, gradients.lost);
  }
  const bool by_present = unit.attendance.divides_by_present && gradients.givers > 0;
  const double scale = by_present ? 1.0 / static_cast<double>(gradients.givers) : unit.gradient_scale();
  if (observer_ != nullptr) observer_->reduces(unit, gradients.sub_buffers.front(), *unit.communicators.reduce, parts, scale);
  return unit.communicators.reduce->reduce_scatter(parts, scale, unit.label("reduce-scatter"));
}

/// Reduces `partial` into the main gradients, or into this replica's share of `partial`.
std::unique_ptr<comm::Pending> Reducer::reduce_over_outer_ranks(GradientAccumulator& gradients) {
  const Unit& unit = gradients.unit;
  const bool accumulate = gradients.valid;
  if (unit.outer_cuts()) allocate_reduced(gradients);
  gradients.partial.wire.acquire(pool_, memory::Kind::kCommunication);
  gradients.partial.staging.acquire(pool_, memory::Kind::kCommunication);
  std::vector<comm::ReducePart> parts;
  Copies conversions;
  for (const auto k : gradients.sub_buffers) {
    const auto& partial = gradients.partial.buffer.parts[k];
    const auto& wire = gradients.partial.wire.parts[k];
    if (wire.defined()) conversions.add(wire, partial);
    parts.push_back({.unreduced = wire.defined() ? wire : partial,
                     .staging = gradients.partial.staging.parts[k],
                     .out = unit.outer_cuts() ? own_piece(gradients, k) : gradients.own_share(k),
                     .accumulate = unit.outer_cuts() && accumulate,
                     .rounded = unit.formats[k].rounds_sums});
    parts.back().encoding = encoding(gradients, k, parts.back().out.numel(), Hop::kOuterReduce, gradients.partial.lost);
  }
  conversions.run();
  if (observer_ != nullptr) observer_->reduces(unit, gradients.sub_buffers.front(), *unit.communicators.outer, parts, 1.0);
  return unit.communicators.outer->reduce_scatter(parts, 1.0, unit.label("outer reduce-scatter"));
}

/// Gathers the replicas' sums into the main gradients, or into `partial`.
std::unique_ptr<comm::Pending> Reducer::gather_over_outer_ranks(const GradientAccumulator& gradients) {
  const Unit& unit = gradients.unit;
  std::vector<comm::GatherPart> parts;
  for (const auto k : gradients.sub_buffers) {
    parts.push_back(unit.outer_cuts() ? comm::GatherPart{.full = inner_region(gradients, k), .shard = own_piece(gradients, k)}
                                      : comm::GatherPart{.full = gradients.partial.buffer.parts[k], .shard = gradients.own_share(k)});
  }
  return unit.communicators.outer->all_gather(parts, unit.label("outer all-gather of gradients"));
}

/// Gathers replicated gradients.
std::unique_ptr<comm::Pending> Reducer::gather_over_inner_ranks(const GradientAccumulator& gradients) {
  const Unit& unit = gradients.unit;
  std::vector<comm::GatherPart> parts;
  for (const auto k : gradients.sub_buffers) {
    parts.push_back({.full = gradients.reduced[k], .shard = inner_region(gradients, k)});
  }
  return unit.communicators.reduce->all_gather(parts, unit.label("all-gather of gradients"));
}

void Reducer::complete(Reduction& reduction) {
  if (!reduction.pending) return;
  reduction.pending->wait_unconfirmed();
  reduction.pending.reset();
  if (observer_ != nullptr) observer_->reduced(reduction.gradients->unit, reduction.gradients->sub_buffers.front());
  auto& gradients = *reduction.gradients;
  const bool has_outer = gradients.unit.communicators.outer != nullptr;
  if (reduction.hop == Hop::kInnerReduce) {
    if (reduction.in_place) take_result(gradients);
    release_unreduced(gradients);
    if (has_outer) gradients.partial.is_held = true;
  } else if (reduction.hop == Hop::kOuterReduce) {
    if (gradients.unit.outer_cuts()) gradients.partial.buffer.release();
    gradients.partial.is_held = false;
    gradients.partial.wire.release();
    gradients.partial.staging.release();
  } else if (reduction.hop == Hop::kOuterGather && !gradients.unit.outer_cuts()) {
    take_sums(gradients);
  }
  const bool is_partial = reduction.hop == Hop::kInnerReduce && has_outer;
  if (!is_partial && !next_hop(reduction)) deliver(gradients);
}

/// The sums of replicas that do not cut shards become the main gradients, or are added to them.
void Reducer::take_sums(GradientAccumulator& gradients) {
  allocate_reduced(gradients);
  std::vector<at::Tensor> regions;
  std::vector<at::Tensor> sums;
  for (const auto k : gradients.sub_buffers) {
    regions.push_back(inner_region(gradients, k));
    sums.push_back(gradients.partial_shards(k));
  }
  // One kernel for all of the unit.
  gradients.valid ? at::_foreach_add_(regions, sums) : at::_foreach_copy_(regions, sums);
  gradients.partial.buffer.release();
}

/// Makes the result that a reduction in place has left in the unreduced buffer the main gradients.
void Reducer::take_result(GradientAccumulator& gradients) {
  Unit& unit = gradients.unit;
  gradients.staging.release();
  allocate_main_gradient(unit);
  Copies results;
  for (const auto k : gradients.sub_buffers) {
    results.add(unit.main_region(gradients.reduced[k], unit.inner_pieces()),
                region(gradients.wire.parts[k], unit.all_pieces(), unit.inner_pieces()));
  }
  results.run();
}

std::optional<Reducer::Hop> Reducer::next_hop(const Reduction& reduction) {
  const Unit& unit = reduction.gradients->unit;
  switch (reduction.hop) {
    case Hop::kInnerReduce:
      if (unit.communicators.outer) return reduction.over_outer ? std::optional(Hop::kOuterReduce) : std::nullopt;
      break;
    case Hop::kOuterReduce:
      if (unit.options.outer_sharded_optimizer) return std::nullopt;
      return Hop::kOuterGather;
    case Hop::kOuterGather:
      break;
    case Hop::kInnerGather:
      return std::nullopt;
  }
  const bool gathers = unit.replicated_optimizer() && !unit.communicators.gather->is_alone();
  return gathers ? std::optional(Hop::kInnerGather) : std::nullopt;
}

bool Reducer::advance(Reduction& reduction) {
  complete(reduction);
  const auto next = next_hop(reduction);
  if (!next) return true;
  reduction.hop = *next;
  start(reduction);
  return false;
}

}  // namespace fsdp::engine
