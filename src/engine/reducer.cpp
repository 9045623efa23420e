#include "engine/reducer.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

/// [Two live gradients] So many units' buffers are alive at most, beside those of the units around them; so many reductions are under way
/// at most, each with its staging.
constexpr std::size_t kLiveGradients = 2;

void zero_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;  // It may have no address.
  if (tensor.is_cpu()) {
    std::memset(tensor.data_ptr(), 0, tensor.nbytes());
  } else {
    tensor.zero_();
  }
}

memory::Kind main_gradients_kind(const Unit& unit) { return unit.offloaded() ? memory::Kind::kHost : memory::Kind::kMainGradients; }

/// [Usage is agreed] Ranks tell each other before which departure from a unit its last gradient came, up to this one: later ones are
/// reduced at the end of backward.
constexpr int kLastDeparture = 4;

bool any_nan(const at::Tensor& tensor) { return at::isnan(tensor).any().item<bool>(); }

void append_bit(std::vector<std::uint8_t>& bits, std::size_t& count, bool value) {
  if (count % 8 == 0) bits.push_back(0);
  if (value) bits.back() |= static_cast<std::uint8_t>(1U << (count % 8));
  ++count;
}

}  // namespace

void Reducer::collect(Unit& unit, std::size_t parameter, const at::Tensor& gradient) {
  auto& target = unit.parameters[parameter];
  if (gradient.is_sparse()) {
    throw Error("parameter '" + target.name + "' of unit '" + unit.name +
                "' got a sparse gradient; flat shards are dense: build its embedding with sparse(false)");
  }
  // The buffer may be on its way: what comes now is reduced at the end of backward, and from the next one on at a later departure.
  while (unit.gradient_state == GradientState::kReducing) complete_oldest_inner();
  if (unit.gradient_state == GradientState::kNone) acquire(unit);
  const auto& view = unit.collecting->views[parameter];
  if (target.gradient_seen) {
    view.add_(gradient);
  } else {
    view.copy_(gradient);
  }
  target.gradient_seen = true;
  target.contributed = true;
  unit.last_gradient = unit.departures + 1;
  unit.adds_up_locally = unit.adds_up_locally || !unit.options.requires_gradient_sync;
}

void Reducer::begin_backward(std::span<const std::unique_ptr<Unit>> units, bool reduces_on_departure) {
  reduces_on_departure_ = reduces_on_departure;
  entered_.clear();
  for (const auto& unit : units) {
    unit->departures = 0;
    unit->last_gradient = 0;
  }
}

void Reducer::enter(Unit& unit) {
  if (unit.trainable() && std::find(entered_.begin(), entered_.end(), &unit) == entered_.end()) entered_.push_back(&unit);
}

void Reducer::depart_to(const Unit& destination, std::span<Unit* const> together) {
  // The last first: enclosed units before the enclosing ones.
  for (std::size_t i = entered_.size(); i-- > 0;) {
    Unit& unit = *entered_[i];
    if (related(unit, destination) || std::find(together.begin(), together.end(), &unit) != together.end()) continue;
    entered_.erase(entered_.begin() + static_cast<std::ptrdiff_t>(i));
    ++unit.departures;
    if (!reduced_on_departure(unit, unit.departures)) continue;
    if (unit.gradient_state == GradientState::kNone) acquire(unit);  // This rank has no gradient: it counts as zero.
    reduce(unit);
  }
}

/// The unit is reduced when backward departs from it for the n-th time.
bool Reducer::reduced_on_departure(const Unit& unit, int n) const {
  return reduces_on_departure_ && unit.options.requires_gradient_sync && n == unit.reduced_at_departure && n < kLastDeparture;
}

void Reducer::acquire(Unit& unit) {
  // What is about to travel is collected in the wire's dtype; what backwards without synchronization add up, in the main gradients'.
  auto& buffer = unit.options.requires_gradient_sync ? unit.wire_gradients : unit.local_gradients();
  unit.collecting = &buffer;
  unit.collects_in_place =
      unit.replicated_gradients() && !unit.main_gradient_valid && !unit.reduced_in_this_backward && &buffer == &unit.local_gradients();
  if (unit.collects_in_place) {
    // Nothing to add to: gradients are collected, and later reduced, in their final place.
    allocate_main_gradient(unit);
    memory::attach(*buffer.storage.unsafeGetStorageImpl(), unit.main_gradient_memory->get(), buffer.bytes);
  } else {
    // A unit whose gradients come without an entry (nothing needs the weights of a first layer) was not departed to: the one before it may
    // still collect.
    const auto collecting = std::count_if(collecting_.begin(), collecting_.end(), [&](const Unit* other) {
      return reduced_on_departure(*other, other->departures + 1) && !related(*other, unit);
    });
    while (inner_under_way() > 0 && inner_under_way() + static_cast<std::size_t>(collecting) >= kLiveGradients) complete_oldest_inner();
    buffer.acquire(pool_, memory::Kind::kUnreducedGradients);
  }
  // Padding reaches gradient norms and optimizer segments: it must be zero, not what the slot held before.
  for (const auto& stretch : buffer.padding) zero_bytes(stretch);
  unit.gradient_state = GradientState::kCollecting;
  collecting_.push_back(&unit);
}

// From torch's allocator, not from a slot: the gradients then lie in memory that activations have left, and the next activations get it
// back, so that the two never add up.
void Reducer::allocate_main_gradient(Unit& unit) {
  if (unit.main_gradient_memory) return;
  auto& buffer = unit.main_gradient_buffer;
  const auto allocate = [&] {
    if (unit.offloaded()) return memory::allocate_host(device_, buffer.bytes);
    const c10::DeviceGuard guard(device_);
    return c10::GetAllocator(device_.type())->allocate(static_cast<std::size_t>(buffer.bytes));
  };
  unit.main_gradient_memory = std::make_shared<c10::DataPtr>(allocate());
  memory::attach(*buffer.storage.unsafeGetStorageImpl(), unit.main_gradient_memory->get(), buffer.bytes);
  accounting_.add(main_gradients_kind(unit), buffer.bytes);
}

/// Memory for the result of a reduction. What is offloaded comes back first, to be added to as everywhere else: adding up on the host would
/// round twice.
void Reducer::allocate_reduced(Unit& unit) {
  if (unit.offloaded()) {
    unit.reduced_buffer.acquire(pool_, memory::Kind::kCommunication);
    if (!unit.main_gradient_valid) return;
    for (std::size_t k = 0; k < unit.reduced.size(); ++k) unit.reduced[k].copy_(unit.main_gradient[k], /*non_blocking=*/true);
  } else {
    allocate_main_gradient(unit);
  }
}

/// The result of a whole reduction reaches the main gradients.
void Reducer::deliver(Unit& unit) {
  if (unit.offloaded()) {
    allocate_main_gradient(unit);
    for (std::size_t k = 0; k < unit.reduced.size(); ++k) {
      unit.main_gradient[k].copy_(unit.reduced[k], /*non_blocking=*/true);
      copies_to_host_ = true;
    }
    unit.reduced_buffer.release();
  }
  unit.main_gradient_valid = true;
}

void Reducer::zero_grad(Unit& unit) {
  unit.main_gradient_valid = false;
  unit.partial_valid = false;
  unit.partial.release();
  for (auto& parameter : unit.parameters) {
    parameter.has_gradient = false;
    parameter.partial = false;
  }
  // Gradients that are collected in place and not yet reduced are not main gradients.
  if (!unit.main_gradient_memory || unit.collects_in_place) return;
  memory::detach(*unit.main_gradient_buffer.storage.unsafeGetStorageImpl());
  unit.main_gradient_memory.reset();
  accounting_.remove(main_gradients_kind(unit), unit.main_gradient_buffer.bytes);
}

// [Order is collective] Reductions begin at moments that all ranks share, and so do the later hops of those that began before: all but the
// newest go on.
void Reducer::reduce(Unit& unit) {
  auto& buffer = *unit.collecting;
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    auto& parameter = unit.parameters[i];
    if (parameter.trainable && !parameter.gradient_seen) zero_bytes(buffer.views[i]);
    if (options_.report_nan && parameter.gradient_seen) parameter.has_nan = parameter.has_nan || any_nan(buffer.views[i]);
    parameter.gradient_seen = false;
  }
  while (inner_under_way() >= kLiveGradients) complete_oldest_inner();  // for gradients that are collected in place, nothing has waited yet
  if (&buffer != &unit.wire_gradients) {
    unit.wire_gradients.acquire(pool_, memory::Kind::kUnreducedGradients);
    for (std::size_t k = 0; k < buffer.parts.size(); ++k) unit.wire_gradients.parts[k].copy_(buffer.parts[k]);
    if (unit.collects_in_place) memory::detach(*buffer.storage.unsafeGetStorageImpl());
    buffer.release();
  }
  unit.gradient_state = GradientState::kReducing;
  unit.reduced_in_this_backward = true;
  collecting_.erase(std::find(collecting_.begin(), collecting_.end(), &unit));
  begin(unit, Hop::kInnerReduce);
}

void Reducer::begin(Unit& unit, Hop hop) {
  for (std::size_t i = 0; i + 1 < reductions_.size();) {
    if (advance(reductions_[i])) {
      reductions_.erase(reductions_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  reductions_.push_back({&unit, hop, hop == Hop::kOuterReduce || unit.options.requires_all_reduce, start(unit, hop)});
}

std::unique_ptr<comm::Pending> Reducer::start(Unit& unit, Hop hop) {
  std::vector<comm::ReducePiece> reduced;
  std::vector<comm::GatherPiece> gathered;
  const auto own_piece = [&](std::size_t k) { return unit.main_region(unit.reduced[k], unit.own_pieces()); };
  const auto inner_region = [&](std::size_t k) { return unit.main_region(unit.reduced[k], unit.inner_pieces()); };
  const auto sub_buffers = unit.reduced.size();
  const bool accumulate = unit.main_gradient_valid;
  switch (hop) {
    case Hop::kInnerReduce:
      // What backwards without synchronization added up is as large as the model: no shard is added to it before staging is freed.
      unit.reduces_in_place =
          unit.adds_up_locally && !unit.groups.outer && !unit.main_gradient_memory && !unit.own_local_gradients && !unit.offloaded();
      if (unit.groups.outer) {
        unit.partial.acquire(pool_, memory::Kind::kUnreducedGradients);
      } else if (!unit.reduces_in_place) {
        allocate_reduced(unit);
      }
      unit.staging.acquire(pool_, memory::Kind::kCommunication);
      for (std::size_t k = 0; k < sub_buffers; ++k) {
        const auto& unreduced = unit.wire_gradients.parts[k];
        reduced.push_back({.unreduced = unreduced,
                           .staging = unit.staging.parts[k],
                           .out = unit.groups.outer       ? unit.partial.parts[k]
                                  : unit.reduces_in_place ? Unit::region(unreduced, unit.all_pieces(), unit.inner_pieces())
                                                          : inner_region(k),
                           .accumulate = unit.groups.outer ? unit.partial_valid : accumulate});
      }
      return unit.groups.reduce->reduce_scatter(reduced, unit.gradient_scale(), unit.label("reduce-scatter"));
    case Hop::kOuterReduce:
      allocate_reduced(unit);
      unit.partial_wire.acquire(pool_, memory::Kind::kCommunication);
      unit.outer_staging.acquire(pool_, memory::Kind::kCommunication);
      for (std::size_t k = 0; k < sub_buffers; ++k) {
        const auto& partial = unit.partial.parts[k];
        const auto& wire = unit.partial_wire.parts[k];
        if (wire.defined()) wire.copy_(partial);
        reduced.push_back({.unreduced = wire.defined() ? wire : partial,
                           .staging = unit.outer_staging.parts[k],
                           .out = own_piece(k),
                           .accumulate = accumulate});
      }
      return unit.groups.outer->reduce_scatter(reduced, 1.0, unit.label("outer reduce-scatter"));
    case Hop::kOuterGather:
      for (std::size_t k = 0; k < sub_buffers; ++k) gathered.push_back({.full = inner_region(k), .shard = own_piece(k)});
      return unit.groups.outer->all_gather(gathered, unit.label("outer all-gather of gradients"));
    case Hop::kInnerGather:
      for (std::size_t k = 0; k < sub_buffers; ++k) gathered.push_back({.full = unit.reduced[k], .shard = inner_region(k)});
      return unit.groups.reduce->all_gather(gathered, unit.label("all-gather of gradients"));
  }
  return {};
}

void Reducer::complete(Reduction& reduction) {
  if (!reduction.pending) return;
  reduction.pending->wait();
  reduction.pending.reset();
  Unit& unit = *reduction.unit;
  if (reduction.hop == Hop::kInnerReduce) {
    if (unit.reduces_in_place) {
      unit.staging.release();
      allocate_main_gradient(unit);
      for (std::size_t k = 0; k < unit.main_gradient.size(); ++k) {
        unit.main_gradient[k].copy_(Unit::region(unit.wire_gradients.parts[k], unit.all_pieces(), unit.inner_pieces()));
      }
    }
    release_unreduced(unit);
    if (unit.groups.outer) unit.partial_valid = true;
  } else if (reduction.hop == Hop::kOuterReduce) {
    unit.partial.release();
    unit.partial_valid = false;
    unit.partial_wire.release();
    unit.outer_staging.release();
  }
  const bool is_partial = reduction.hop == Hop::kInnerReduce && unit.groups.outer;
  if (!is_partial && !next_hop(reduction)) deliver(unit);
}

std::optional<Reducer::Hop> Reducer::next_hop(const Reduction& reduction) {
  const Unit& unit = *reduction.unit;
  switch (reduction.hop) {
    case Hop::kInnerReduce:
      if (unit.groups.outer) return reduction.over_outer ? std::optional(Hop::kOuterReduce) : std::nullopt;
      break;
    case Hop::kOuterReduce:
      if (unit.options.outer_sharded_optimizer) return std::nullopt;
      return Hop::kOuterGather;
    case Hop::kOuterGather:
      break;
    case Hop::kInnerGather:
      return std::nullopt;
  }
  return unit.replicated_optimizer() ? std::optional(Hop::kInnerGather) : std::nullopt;
}

bool Reducer::advance(Reduction& reduction) {
  complete(reduction);
  const auto next = next_hop(reduction);
  if (!next) return true;
  reduction.hop = *next;
  reduction.pending = start(*reduction.unit, *next);
  return false;
}

std::size_t Reducer::inner_under_way() const {
  return static_cast<std::size_t>(std::count_if(reductions_.begin(), reductions_.end(),
                                                [](const Reduction& r) { return r.hop == Hop::kInnerReduce && r.pending != nullptr; }));
}

// Its later hops start with those of all ranks: when a rank waits depends on the gradients that it happened to get.
void Reducer::complete_oldest_inner() {
  for (auto& reduction : reductions_) {
    if (reduction.hop == Hop::kInnerReduce && reduction.pending) return complete(reduction);
  }
}

void Reducer::drain() {
  while (!reductions_.empty()) {
    // One hop of each in turn, so that they overlap.
    for (std::size_t i = 0; i < reductions_.size();) {
      if (advance(reductions_[i])) {
        reductions_.erase(reductions_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
  }
  if (std::exchange(copies_to_host_, false)) memory::synchronize(device_);
}

void Reducer::release_unreduced(Unit& unit) {
  if (unit.collects_in_place) memory::detach(*unit.collecting->storage.unsafeGetStorageImpl());
  unit.wire_gradients.release();
  if (unit.own_local_gradients) unit.own_local_gradients->release();
  unit.staging.release();
  unit.collecting = nullptr;
  unit.adds_up_locally = false;
  unit.reduces_in_place = false;
  unit.collects_in_place = false;
  unit.gradient_state = GradientState::kNone;
}

void Reducer::exchange_usage(std::span<Unit* const> units) {
  // Bits: for each unit, has it unreduced gradients, and came its last gradient after the first departure, the second, ...; for each
  // parameter, had this rank a gradient.
  std::vector<std::uint8_t> bits;
  std::size_t count = 0;
  for (const Unit* unit : units) {
    append_bit(bits, count, unit->gradient_state == GradientState::kCollecting);
    for (int n = 1; n < kLastDeparture; ++n) append_bit(bits, count, unit->last_gradient > n);
    for (const auto& parameter : unit->parameters) append_bit(bits, count, parameter.contributed);
  }
  const auto agree = [&](comm::Communicator& communicator) {
    const auto own = at::from_blob(bits.data(), {static_cast<std::int64_t>(bits.size())}, at::kByte);
    const auto all = communicator.exchange(own, units.front()->label("gradient usage"));
    const auto* bytes = all.const_data_ptr<std::uint8_t>();
    for (std::int64_t rank = 0; rank < all.size(0); ++rank) {
      for (std::size_t i = 0; i < bits.size(); ++i) bits[i] |= bytes[static_cast<std::size_t>(rank) * bits.size() + i];
    }
  };
  agree(*units.front()->groups.reduce);
  if (units.front()->groups.outer) agree(*units.front()->groups.outer);
  std::size_t position = 0;
  const auto next_bit = [&] {
    const bool bit = ((bits[position / 8] >> (position % 8)) & 1U) != 0;
    ++position;
    return bit;
  };
  for (Unit* unit : units) {
    unit->to_reduce = next_bit();
    int last_gradient = 1;
    for (int n = 1; n < kLastDeparture; ++n) last_gradient += next_bit() ? 1 : 0;
    bool contributed = false;
    const bool fully = !unit->groups.outer || unit->options.requires_all_reduce;
    for (auto& parameter : unit->parameters) {
      const bool now = next_bit();
      const bool any = now || parameter.partial;
      contributed = contributed || now;
      parameter.contributed = false;
      parameter.partial = any && !fully;
      parameter.has_gradient = (any && fully) || parameter.has_gradient;
    }
    if (contributed) unit->reduced_at_departure = last_gradient;
  }
}

void Reducer::finish(std::span<const std::unique_ptr<Unit>> units) {
  // Units on the same ranks speak together.
  std::vector<std::vector<Unit*>> neighbours;
  for (const auto& unit : units) {
    if (!unit->options.requires_gradient_sync) continue;
    const auto same = std::find_if(neighbours.begin(), neighbours.end(), [&](const auto& others) {
      return others.front()->groups.reduce == unit->groups.reduce && others.front()->groups.outer == unit->groups.outer;
    });
    (same == neighbours.end() ? neighbours.emplace_back() : *same).push_back(unit.get());
  }
  for (const auto& group : neighbours) exchange_usage(group);
  for (const auto& unit : units) {
    if (!unit->options.requires_gradient_sync) continue;
    const auto active = [&] {
      return std::any_of(reductions_.begin(), reductions_.end(), [&](const Reduction& r) { return r.unit == unit.get(); });
    };
    if (unit->to_reduce) {
      if (active()) drain();  // It is reduced a second time, into what may be on its way.
      if (unit->gradient_state == GradientState::kNone) acquire(*unit);
      reduce(*unit);
    } else if (unit->partial_valid && unit->options.requires_all_reduce && !active()) {
      begin(*unit, Hop::kOuterReduce);
    }
  }
  for (const auto& unit : units) unit->reduced_in_this_backward = false;
}

void Reducer::report_nan(std::span<const std::unique_ptr<Unit>> units) {
  // This rank's number, then two values for each parameter: before its reduction, and after, in this rank's own piece of the result.
  std::vector<std::int32_t> found{static_cast<std::int32_t>(options_.rank)};
  for (const auto& unit : units) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      auto& parameter = unit->parameters[i];
      found.push_back(std::exchange(parameter.has_nan, false) ? 1 : 0);
      const auto slice = unit->slice(i, unit->own_pieces());
      const bool reduced = parameter.has_gradient && unit->main_gradient_valid && slice.numel > 0;
      found.push_back(reduced && any_nan(unit->main_gradient[slice.sub_buffer].narrow(0, slice.offset, slice.numel)) ? 1 : 0);
    }
  }
  const auto& groups = units.front()->groups;
  const comm::Label label{.operation = "report of NaN", .unit = "(all)", .model = units.front()->model};
  auto all = groups.reduce->exchange(at::tensor(found, at::kInt), label);
  if (groups.outer) all = groups.outer->exchange(all.reshape({-1}), label);
  all = all.reshape({-1, static_cast<std::int64_t>(found.size())});
  if (!all.narrow(1, 1, all.size(1) - 1).any().item<bool>()) return;
  std::string text = "NaN in gradients of this backward:";
  const auto* values = all.const_data_ptr<std::int32_t>();
  std::size_t column = 1;
  for (const auto& unit : units) {
    for (const auto& parameter : unit->parameters) {
      for (const char* when : {"before", "after"}) {
        std::string ranks;
        for (std::int64_t row = 0; row < all.size(0); ++row) {
          const auto* of_rank = values + static_cast<std::size_t>(row) * found.size();
          if (of_rank[column] != 0) ranks += (ranks.empty() ? "" : ", ") + std::to_string(of_rank[0]);
        }
        ++column;
        if (!ranks.empty())
          text += "\n  parameter '" + parameter.name + "' of unit '" + unit->name + "' " + when + " reduction, on rank " + ranks;
      }
    }
  }
  throw Error(
      text +
      "\nNaN before reduction came out of the model's own backward on that rank; NaN only after it, from infinities of opposite sign "
      "on several ranks. Gradients are kept: call zero_grad() to go on without this step");
}

void Reducer::drop(std::span<const std::unique_ptr<Unit>> units) {
  reductions_.clear();  // waits for each; what it brings is not to be trusted
  collecting_.clear();
  entered_.clear();
  for (const auto& unit : units) {
    release_unreduced(*unit);
    unit->partial_wire.release();
    unit->outer_staging.release();
    unit->reduced_buffer.release();
    unit->reduced_in_this_backward = false;
    for (auto& parameter : unit->parameters) {
      parameter.gradient_seen = false;
      parameter.has_nan = false;
      parameter.contributed = false;
    }
  }
}

}  // namespace fsdp::engine
