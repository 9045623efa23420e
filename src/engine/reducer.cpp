#include "engine/reducer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/copies.h"
#include "comm/mesh/ranks.h"
#include "comm/parts.h"
#include "engine/gradient_usage.h"
#include "engine/tensor_bytes.h"
#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

/// [Two live gradients] The largest number of units with unreduced gradients, beside the units that enclose them, and of reductions under
/// way, each with its staging.
constexpr std::size_t kLiveGradients = 2;

/// Bytes of a gradient up to which a GPU takes less time to copy it than a host to launch that. Larger ones are copied, and freed, at once.
constexpr std::int64_t kCopiedTogether = std::int64_t{4} << 20;

/// How many ranks reduce the gradients of a unit.
std::int64_t ranks_of(const Unit& unit) {
  return unit.communicators.reduce->size() * (unit.communicators.outer ? unit.communicators.outer->size() : 1);
}

/// The sub-buffers of a unit that are reduced together.
std::vector<std::vector<std::size_t>> reduced_together(const Unit& unit) {
  std::vector<std::vector<std::size_t>> divided;
  std::vector<std::size_t> rest;
  for (std::size_t k = 0; k < unit.layout.trainable_sub_buffers(); ++k) {
    const auto numel = unit.layout.sub_buffers()[k].shard_numel * unit.layout.world_size();
    const bool is_large = numel * static_cast<std::int64_t>(c10::elementSize(unit.formats[k].compute)) >= reduced_alone();
    if (is_large) divided.push_back({k});
    if (!is_large) rest.push_back(k);
  }
  if (!rest.empty()) divided.insert(divided.begin(), std::move(rest));
  return divided;
}

}  // namespace

void Reducer::add(Unit& unit) {
  gradients_.push_back(std::make_unique<GradientAccumulator>(unit));
  by_unit_.push_back({gradients_.back().get()});
  divided_ = false;
}

void Reducer::forget_units() {
  gradients_.clear();
  by_unit_.clear();
}

void Reducer::index_units() {
  by_unit_.clear();
  for (const auto& gradients : gradients_) {
    const auto index = gradients->unit.place.index;
    if (by_unit_.size() <= index) by_unit_.resize(index + 1);
    by_unit_[index].push_back(gradients.get());
  }
}

/// [Large parameters do not wait] Which units enclose others is known when all have been added. Those that have gradients are not divided.
void Reducer::divide_units() {
  if (std::exchange(divided_, true)) return;
  std::unordered_set<const Unit*> enclosing;
  for (const auto& gradients : gradients_) enclosing.insert(gradients->unit.place.parent);
  std::vector<std::unique_ptr<GradientAccumulator>> divided;
  for (auto& gradients : gradients_) {
    Unit& unit = gradients->unit;
    const bool is_idle = gradients->state == GradientState::kNone && !gradients->valid && !gradients->partial.is_held;
    const auto parts = reduced_together(unit);
    if (!enclosing.contains(&unit) || !is_idle || gradients->is_part || unit.replicated_gradients() || parts.size() < 2) {
      divided.push_back(std::move(gradients));
      continue;
    }
    forget_lost(*gradients);
    for (const auto& sub_buffers : parts) {
      divided.push_back(std::make_unique<GradientAccumulator>(unit, sub_buffers));
      divided.back()->departures.reduced_at = kLastDeparture;
    }
  }
  gradients_ = std::move(divided);
  index_units();
}

GradientAccumulator& Reducer::of(const Unit& unit, std::size_t parameter) const {
  const auto& parts = by_unit_[unit.place.index];
  if (parts.size() == 1) return *parts.front();
  const auto k = unit.layout.positions()[parameter].sub_buffer;
  return **std::find_if(parts.begin(), parts.end(), [k](const GradientAccumulator* part) {
    return std::find(part->sub_buffers.begin(), part->sub_buffers.end(), k) != part->sub_buffers.end();
  });
}

// Functions that take gradients from autograd into a buffer.

void Reducer::collect(Unit& unit, std::size_t parameter, const at::Tensor& gradient) {
  if (gradient.is_sparse()) {
    throw Error("parameter '" + unit.parameters[parameter].name + "' of unit '" + unit.name +
                "' got a sparse gradient; flat shards are dense: build its embedding with sparse(false)");
  }
  auto& gradients = of(unit, parameter);
  // The buffer may be under reduction. A gradient that comes now is reduced at the end of backward; from the next backward on, the unit is
  // reduced at a later departure.
  while (gradients.state == GradientState::kReducing) complete_oldest_inner();
  if (gradients.state == GradientState::kNone) acquire(gradients);
  auto& target = gradients.parameters[parameter];
  if (gradients.collected_in == CollectedIn::kComputed) {
    const bool fits = !target.seen && gradient.scalar_type() == gradients.computed->views[parameter].scalar_type();
    gradients.arrived_twice = gradients.arrived_twice || !fits || target.contributed;
    if (!fits && gradients.sent_in == SentIn::kComputeDtype) {
      gradients.unexpected.push_back({parameter, gradient.clone()});
      gradients.departures.last_gradient = gradients.departures.count + 1;
      return;
    }
    if (!fits) convert_collected(gradients);
  }
  const auto& view = gradients.collected().views[parameter];
  if (target.seen) {
    gradients.arrived.copy();
    view.add_(gradient);
  } else if (options_.on_stream && static_cast<std::int64_t>(view.nbytes()) <= kCopiedTogether) {
    gradients.arrived.add(parameter, view, gradient);
  } else if (!copy_bytes(gradient, view)) {
    view.copy_(gradient);
  }
  target.seen = true;
  target.contributed = true;
  gradients.departures.last_gradient = gradients.departures.count + 1;
  if (!unit.options.requires_gradient_sync) gradients.state = GradientState::kAddingUp;
}

void Reducer::acquire(GradientAccumulator& gradients) {
  const bool synchronizes = gradients.unit.options.requires_gradient_sync;
  const bool as_computed = gradients.computed && gradients.sent_in != SentIn::kWireDtype && !gradients.adds_up;
  acquire_buffer(gradients, !synchronizes ? CollectedIn::kLocal : as_computed ? CollectedIn::kComputed : CollectedIn::kWire);
  gradients.state = GradientState::kCollecting;
  collecting_.push_back(&gradients);
}

void Reducer::acquire_buffer(GradientAccumulator& gradients, CollectedIn collected_in) {
  Unit& unit = gradients.unit;
  gradients.collected_in = collected_in;
  auto& buffer = gradients.collected();
  const bool fits_main = unit.replicated_gradients() && !gradients.is_part && &buffer == &gradients.local();
  if (fits_main && !unit.main_gradient.valid && !under_way(gradients) && !aside_) {
    // Nothing to add to: gradients are collected, and later reduced, in their final place.
    gradients.collected_in = CollectedIn::kMain;
    allocate_main_gradient(unit);
    memory::attach(*buffer.storage.unsafeGetStorageImpl(), unit.main_gradient.memory->get(), buffer.bytes);
  } else {
    // If a unit's gradients come without an entry (because backward does not need the weights of a first layer), there was no departure to
    // it, and the unit before it may still be collecting.
    const auto collecting = std::count_if(collecting_.begin(), collecting_.end(), [&](const GradientAccumulator* other) {
      const bool stays = !gradients.is_part && related(other->unit, unit);
      return reduced_on_departure(*other, other->departures.count + 1) && !stays;
    });
    while (inner_under_way() > 0 && inner_under_way() + static_cast<std::size_t>(collecting) >= kLiveGradients) complete_oldest_inner();
    buffer.acquire(pool_, memory::Kind::kUnreducedGradients);
  }
  // Padding reaches gradient norms and optimizer segments: it must be zero, not what the slot held before.
  for (const auto& stretch : buffer.padding) zero_bytes(stretch);
}

/// From gradients as they were computed to the wire's dtype, in which others can be added to them.
void Reducer::convert_collected(GradientAccumulator& gradients) {
  auto& computed = *gradients.computed;
  gradients.arrived.copy();
  acquire_buffer(gradients, CollectedIn::kWire);
  Copies conversions;
  for (const auto k : gradients.sub_buffers) conversions.add(gradients.collected().parts[k], computed.parts[k]);
  conversions.run();
  computed.release();
}

void Reducer::collect_unexpected(GradientAccumulator& gradients) {
  if (gradients.unexpected.empty()) return;
  gradients.sent_in = SentIn::kWireDtype;  // The exchange of usage tells the other ranks.
  const int last_gradient = gradients.departures.last_gradient;
  for (const auto& [parameter, gradient] : std::exchange(gradients.unexpected, {})) collect(gradients.unit, parameter, gradient);
  gradients.departures.last_gradient = last_gradient;
}

// Functions that decide when reductions begin.

void Reducer::begin_backward(bool reduces_on_departure) {
  divide_units();
  reduces_on_departure_ = reduces_on_departure;
  expects_ = reduces_on_departure;
  entered_.clear();
  interrupted_.clear();
  for (const auto& gradients : gradients_) {
    gradients->departures.count = 0;
    gradients->departures.last_gradient = 0;
    gradients->adds_up = gradients->adds_up || !gradients->unit.options.requires_gradient_sync;
  }
}

void Reducer::enter(Unit& unit) {
  for (const Unit* entered : entered_) {
    if (entered == &unit || !encloses(*entered, unit)) continue;
    for (auto* gradients : by_unit_[entered->place.index]) {
      if (gradients->is_part) depart_from(*gradients);  // [Large parameters do not wait]
    }
  }
  if (unit.trainable() && std::find(entered_.begin(), entered_.end(), &unit) == entered_.end()) entered_.push_back(&unit);
}

void Reducer::reenter(Unit& unit) {
  if (std::erase(interrupted_, &unit) > 0) enter(unit);
}

void Reducer::depart_to(const Unit& destination, std::span<Unit* const> together, Pass pass) {
  // In reverse order, so that enclosed units come before those that enclose them.
  for (std::size_t i = entered_.size(); i-- > 0;) {
    Unit& unit = *entered_[i];
    if (related(unit, destination) || std::find(together.begin(), together.end(), &unit) != together.end()) continue;
    entered_.erase(entered_.begin() + static_cast<std::ptrdiff_t>(i));
    if (pass == Pass::kForward) interrupted_.push_back(&unit);
    for (auto* gradients : by_unit_[unit.place.index]) depart_from(*gradients);
  }
}

void Reducer::depart_from(GradientAccumulator& gradients) {
  ++gradients.departures.count;
  if (!reduced_on_departure(gradients, gradients.departures.count)) return;
  if (gradients.state == GradientState::kNone) acquire(gradients);  // This rank has no gradient: it counts as zero.
  // [Two live gradients]
  while (options_.on_stream && inner_under_way() > 0) complete_oldest_inner();
  reduce(gradients);
}

/// The unit is reduced when backward departs from it for the n-th time.
bool Reducer::reduced_on_departure(const GradientAccumulator& gradients, int n) const {
  const bool synchronizes = reduces_on_departure_ && gradients.unit.options.requires_gradient_sync;
  return synchronizes && n == gradients.departures.reduced_at && n < kLastDeparture;
}

void Reducer::finish() {
  // Units on the same ranks speak together.
  std::vector<std::vector<GradientAccumulator*>> neighbours;
  for (const auto& gradients : gradients_) {
    const Unit& unit = gradients->unit;
    if (!unit.options.requires_gradient_sync) continue;
    const auto same = std::find_if(neighbours.begin(), neighbours.end(), [&](const auto& others) {
      const auto& communicators = others.front()->unit.communicators;
      return communicators.reduce == unit.communicators.reduce && communicators.outer == unit.communicators.outer;
    });
    (same == neighbours.end() ? neighbours.emplace_back() : *same).push_back(gradients.get());
  }
  // [Usage is agreed] What was left to this moment last time is again, most likely: the device reduces it while the host asks. If it is
  // not, it counts as zero.
  const bool expects = std::exchange(expects_, false);
  for (const auto& gradients : gradients_) {
    const bool departed =
        gradients->departures.count >= gradients->departures.reduced_at && gradients->departures.reduced_at < kLastDeparture;
    gradients->reduced_unasked = expects && gradients->left_to_end && !departed && gradients->unit.options.requires_gradient_sync &&
                                 !gradients->unit.attendance.optional;
    if (gradients->reduced_unasked) reduce_at_end(*gradients);
    collect_unexpected(*gradients);
  }
  std::unordered_set<const GradientAccumulator*> unreduced;
  for (const auto& group : neighbours) {
    const auto left = exchange_usage(group);
    find_givers(left);
    unreduced.insert(left.begin(), left.end());
  }
  std::int64_t all_ranks = 0;
  for (const auto& gradients : gradients_) all_ranks = std::max(all_ranks, ranks_of(gradients->unit));
  const auto comes_last = [&](const GradientAccumulator& gradients) {
    return gradients.unit.attendance.optional && ranks_of(gradients.unit) < all_ranks;
  };
  for (const auto& gradients : gradients_) {
    if (!comes_last(*gradients)) reduce_left(*gradients, unreduced.contains(gradients.get()));
  }
  // [Attendance is agreed] On some ranks of the model, nobody may have used a unit that has fewer ranks. No hop of another reduction may
  // begin with that of such a unit.
  for (const auto& gradients : gradients_) {
    if (!comes_last(*gradients)) continue;
    drain();
    reduce_left(*gradients, unreduced.contains(gradients.get()));
  }
}

/// What the end of backward still has to reduce of these gradients.
void Reducer::reduce_left(GradientAccumulator& gradients, bool is_unreduced) {
  const auto& options = gradients.unit.options;
  if (is_unreduced) {
    reduce_at_end(gradients);
  } else if (options.requires_gradient_sync && options.requires_all_reduce && gradients.partial.is_held && !under_way(gradients)) {
    begin({.gradients = &gradients, .hop = Hop::kOuterReduce, .over_outer = true, .in_place = false});
  }
  gradients.arrived.copy();
  if (options.requires_gradient_sync) gradients.unit.attendance.gives = false;
}

/// [Attendance is agreed] Ranks that have not attended optional units have no gradients of them.
void Reducer::find_givers(std::span<GradientAccumulator* const> unreduced) const {
  std::vector<GradientAccumulator*> optional;
  std::vector<std::uint8_t> mine;
  for (auto* gradients : unreduced) {
    if (!gradients->unit.attendance.optional) continue;
    optional.push_back(gradients);
    mine.push_back(gradients->collects() || gradients->unit.attendance.gives ? 1 : 0);
  }
  if (optional.empty()) return;
  const Unit& first = optional.front()->unit;
  const auto all = comm::Ranks({first.communicators.outer, first.communicators.reduce})
                       .exchange(at::from_blob(mine.data(), {static_cast<std::int64_t>(mine.size())}, at::kByte),
                                 first.label("exchange of which ranks give gradients"));
  const auto* const of_ranks = all.const_data_ptr<std::uint8_t>();
  const std::int64_t inner = first.communicators.reduce->size();
  for (std::size_t k = 0; k < optional.size(); ++k) {
    std::vector<bool> gives;
    for (std::int64_t rank = 0; rank < all.size(0); ++rank)
      gives.push_back(of_ranks[rank * all.size(1) + static_cast<std::int64_t>(k)] != 0);
    optional[k]->givers = std::count(gives.begin(), gives.end(), true);
    if (optional[k]->givers == all.size(0) || observer_ != nullptr) continue;  // An observer sees the gradients of all ranks.
    const auto row = gives.begin() + first.communicators.outer_rank() * inner;
    optional[k]->gives.assign(row, row + inner);
  }
}

void Reducer::reduce_at_end(GradientAccumulator& gradients) {
  if (under_way(gradients)) drain();  // It is reduced a second time, into what may be on its way.
  if (!gradients.gives.empty() && !gradients.gives[static_cast<std::size_t>(gradients.unit.communicators.reduce->rank())]) {
    const bool as_computed = gradients.computed && gradients.sent_in != SentIn::kWireDtype && !gradients.adds_up;
    gradients.collected_in = as_computed ? CollectedIn::kComputed : CollectedIn::kWire;
    agree_on_dtype(gradients);
    while (inner_under_way() >= kLiveGradients) complete_oldest_inner();
    return begin_inner(gradients, /*in_place=*/false);
  }
  if (gradients.state == GradientState::kNone) acquire(gradients);
  reduce(gradients);
}

void Reducer::validate() const {
  for (const auto& gradients : gradients_) {
    if (!gradients->unit.options.requires_gradient_sync || !gradients->collects()) continue;
    throw Error("internal: unit '" + gradients->unit.name + "' has unreduced gradients after backward");
  }
}

void Reducer::report_nan() const {
  if (options_.report_nan) engine::report_nan(gradients_, options_.rank);
}

// A reduction.

// [Order is collective] Reductions begin at moments that all ranks share, and so do later hops of earlier ones: all but the newest
// continue.
void Reducer::reduce(GradientAccumulator& gradients) {
  Unit& unit = gradients.unit;
  agree_on_dtype(gradients);
  auto& buffer = gradients.collected();
  // What has added up may be reduced in its place.
  const bool travels = gradients.collected_in == CollectedIn::kComputed || gradients.collected_in == CollectedIn::kWire;
  const bool may_lend = travels && gradients.state == GradientState::kCollecting && !options_.report_nan && !pool_.has_source();
  if (gradients.arrived.settle(unit.layout, buffer, may_lend)) buffer.release();
  for (const auto i : gradients.held) {
    auto& parameter = gradients.parameters[i];
    if (unit.parameters[i].trainable && !parameter.seen) zero_bytes(buffer.views[i]);
    if (options_.report_nan && parameter.seen) {
      const auto has_nan = any_nan(buffer.views[i]);
      parameter.has_nan = parameter.has_nan.defined() ? parameter.has_nan.logical_or(has_nan) : has_nan;
    }
    parameter.seen = false;
  }
  while (inner_under_way() >= kLiveGradients)
    complete_oldest_inner();  // needed for gradients that are collected in place, for which nothing has waited yet
  if (&buffer != &gradients.sent()) {
    gradients.wire.acquire(pool_, memory::Kind::kUnreducedGradients);
    Copies conversions;
    for (const auto k : gradients.sub_buffers) conversions.add(gradients.wire.parts[k], buffer.parts[k]);
    conversions.run();
    if (gradients.collected_in == CollectedIn::kMain) memory::detach(*buffer.storage.unsafeGetStorageImpl());
    buffer.release();
  }
  if (observer_ != nullptr) show_collected(gradients);
  if (aside_) {
    gradients.adds_up = false;
    collecting_.erase(std::find(collecting_.begin(), collecting_.end(), &gradients));
    return release_unreduced(gradients);
  }
  // The gradients that backwards without synchronization have added up are as large as the model, so no main gradients are allocated in
  // addition before staging is freed.
  const bool in_place = gradients.state == GradientState::kAddingUp && !unit.communicators.outer && !unit.main_gradient.memory &&
                        !gradients.own_local && !unit.offloaded();
  begin_inner(gradients, in_place);
}

void Reducer::begin_inner(GradientAccumulator& gradients, bool in_place) {
  gradients.state = GradientState::kReducing;
  gradients.adds_up = false;
  std::erase(collecting_, &gradients);
  const bool over_outer = gradients.unit.options.requires_all_reduce;
  begin({.gradients = &gradients, .hop = Hop::kInnerReduce, .over_outer = over_outer, .in_place = in_place});
  if (!overlaps_) drain();
}

/// [Sent as computed] Each rank knows only of its own gradients how they arrived.
void Reducer::agree_on_dtype(GradientAccumulator& gradients) {
  if (!gradients.agrees_on_dtype || gradients.adds_up) return;
  const bool as_computed = gradients.collected_in == CollectedIn::kComputed;
  if (gradients.sent_in == SentIn::kUndecided) {
    const Unit& unit = gradients.unit;
    const bool agreed = comm::Ranks({unit.communicators.outer, unit.communicators.reduce})
                            .agree(as_computed, unit.label("agreement on the dtype in which gradients are sent"));
    gradients.sent_in = agreed ? SentIn::kComputeDtype : SentIn::kWireDtype;
  }
  if (!as_computed || gradients.sent_in != SentIn::kWireDtype) return;
  if (gradients.collects()) return convert_collected(gradients);
  gradients.collected_in = CollectedIn::kWire;  // This rank gives none.
}

void Reducer::show_collected(const GradientAccumulator& gradients) {
  std::vector<at::Tensor> unreduced;
  for (std::size_t k = 0; k < gradients.sent().parts.size(); ++k) unreduced.push_back(gradients.unreduced(k));
  observer_->collected(gradients.unit, unreduced, gradients.state == GradientState::kCollecting);
}

// [Hops start together]
void Reducer::begin(Reduction reduction) {
  advance_all_but(1);
  start(reductions_.emplace_back(std::move(reduction)));
}

void Reducer::advance_all_but(std::size_t newest) {
  for (std::size_t i = 0; i + newest < reductions_.size();) {
    if (advance(reductions_[i])) {
      reductions_.erase(reductions_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

bool Reducer::under_way(const GradientAccumulator& gradients) const {
  return std::any_of(reductions_.begin(), reductions_.end(), [&](const Reduction& r) { return r.gradients == &gradients; });
}

std::size_t Reducer::inner_under_way() const {
  return static_cast<std::size_t>(std::count_if(reductions_.begin(), reductions_.end(),
                                                [](const Reduction& r) { return r.hop == Hop::kInnerReduce && r.pending != nullptr; }));
}

// Later hops do not start here. They start at moments that all ranks share; when a rank waits here depends on the gradients that it
// happened to get.
void Reducer::complete_oldest_inner() {
  for (auto& reduction : reductions_) {
    if (reduction.hop == Hop::kInnerReduce && reduction.pending) return complete(reduction);
  }
}

void Reducer::drain() {
  while (!reductions_.empty()) advance_all_but(0);  // one hop of each in turn, so that they overlap
  if (std::exchange(copies_to_host_, false)) memory::synchronize(device_);
}

// Rehearsals.

void Reducer::begin_observation() {
  divide_units();
  predicted_.clear();
  for (const auto& gradients : gradients_) {
    predicted_.push_back({.reduced_at = gradients->departures.reduced_at,
                          .left_to_end = gradients->left_to_end,
                          .sent_in = gradients->sent_in,
                          .adds_up = gradients->adds_up});
  }
}

void Reducer::begin_rehearsal() {
  aside_ = {.gradients = std::exchange(gradients_, {}), .collecting = std::exchange(collecting_, {}), .expects = expects_};
  for (std::size_t i = 0; i < aside_->gradients.size(); ++i) {
    const auto& kept = aside_->gradients[i];
    auto& fresh = *gradients_.emplace_back(std::make_unique<GradientAccumulator>(kept->unit, kept->sub_buffers));
    const auto& predicted = predicted_[i];
    fresh.departures.reduced_at = predicted.reduced_at;
    fresh.left_to_end = predicted.left_to_end;
    fresh.sent_in = predicted.sent_in;
    fresh.adds_up = predicted.adds_up;
  }
  index_units();
}

void Reducer::end_rehearsal() {
  drop();
  gradients_ = std::move(aside_->gradients);
  index_units();
  collecting_ = std::move(aside_->collecting);
  expects_ = aside_->expects;
  aside_.reset();
}

// Ends.

void Reducer::release_unreduced(GradientAccumulator& gradients) {
  if (gradients.state != GradientState::kNone && gradients.collected_in == CollectedIn::kMain) {
    memory::detach(*gradients.local().storage.unsafeGetStorageImpl());
  }
  gradients.arrived.clear();
  gradients.wire.release();
  if (gradients.own_local) gradients.own_local->release();
  if (gradients.computed) gradients.computed->release();
  gradients.staging.release();
  gradients.computed_staging.release();
  gradients.gives.clear();
  gradients.givers = 0;
  gradients.state = GradientState::kNone;
}

void Reducer::reset(bool took_all) {
  bool keeps = !took_all;
  try {
    if (keeps) drain();
  } catch (const CommError&) {
    keeps = false;  // Every later collective of these ranks will report the error.
  }
  drop();
  if (keeps) return;
  zero_grad();
  for (const auto& gradients : gradients_) forget_lost(*gradients);
}

void Reducer::drop() {
  reductions_.clear();  // waits for each; what it brings is not to be trusted
  collecting_.clear();
  entered_.clear();
  interrupted_.clear();
  for (const auto& gradients : gradients_) {
    release_unreduced(*gradients);
    if (!gradients->partial.is_held) gradients->partial.buffer.release();
    gradients->partial.wire.release();
    gradients->partial.staging.release();
    gradients->reduced_buffer.release();
    for (auto& parameter : gradients->parameters) {
      parameter.seen = false;
      parameter.has_nan.reset();
      parameter.contributed = false;
    }
    gradients->unexpected.clear();
  }
}

}  // namespace fsdp::engine
