#include "engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::engine {
namespace {

bool contains(std::span<Unit* const> units, const Unit& unit) { return std::find(units.begin(), units.end(), &unit) != units.end(); }

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      prefetch_depth_(options.prefetch_depth),
      stream_(options.mesh.device()),
      events_(options.events_source, accounting_),
      pools_(options.mesh.device(), accounting_, options.on_cpu() ? memory::SlotPool::Idle::kStays : memory::SlotPool::Idle::kIsFreed),
      gatherer_(options.mesh.device(), pools_, options.keep_gathered_bytes),
      reducer_(options.mesh.device(), pools_.of_the_rest(), accounting_,
               {.rank = options.mesh.rank(), .report_nan = options.report_nan_in_param_grad, .on_stream = !options.on_cpu()}),
      main_parameters_(*this) {}

Engine::~Engine() {
  stream_.rejoin();
  reducer_.drop();
  for (const auto& unit : units_) {
    unit->whole.gather.reset();  // waits
    unit->whole.free();
  }
}

Unit& Engine::add(std::unique_ptr<Unit> unit) {
  const auto lock = this->lock();
  unit->place.index = units_.size();
  unit->place.model = options_.model;
  unit->place.facts = &facts_;
  units_.push_back(std::move(unit));
  reducer_.add(*units_.back());
  return *units_.back();
}

std::vector<std::unique_ptr<Unit>> Engine::release() {
  const auto lock = this->lock_for_use();
  reset_locked();
  main_parameters_.state_ = MainState::kRetired;
  reducer_.forget_units();
  for (const auto& unit : units_) {
    if (!unit->replicated_parameters()) unit->whole.free();  // Slots that units have kept are this engine's.
    unit->place.called.clear();
  }
  return std::move(units_);
}

std::unique_lock<std::mutex> Engine::lock() {
  std::unique_lock held(mutex_);
  stream_.follow();
  return held;
}

void Engine::rethrow_with_history(const std::exception& error) const {
  std::string text = error.what();
  if (text.ends_with('.')) text.pop_back();
  throw CommError(text + "; last units that this rank touched, newest first: " + events_.last_units());
}

// One training step: begin_forward, enter, move_to, depart_to, Gatherer::start, read_ahead, Gatherer::finish in forward; begin_backward,
// the same and gradient in backward; end_backward.

// [Current when forward begins]
void Engine::begin_forward(bool kept_is_outdated) {
  const auto lock = this->lock_for_use();
  running_.clear();
  events_.forward_begins(units_);
  guarded([&] {
    for (const auto& unit : units_) refresh_locked(*unit, kept_is_outdated);
    forget_moves();
    schedule_.begin(Pass::kForward);
    const at::NoGradGuard no_grad;
    for (const auto& unit : units_) gatherer_.start_shards(*unit);
  });
}

void Engine::end_forward() {
  const auto lock = this->lock();
  guarded([&] { confirm(); });
}

// [Compared before it is used]
void Engine::confirm() const {
  for (const auto& unit : units_) {
    const auto& [gather, reduce, outer, post_forward] = unit->communicators;
    for (const auto& row : {gather.get(), reduce.get(), outer.get(), post_forward.get()}) {
      if (row != nullptr) row->confirm();
    }
  }
}

/// True if the ranks' calls are compared later: at the end of the forward, if the trigger reports it, or of the backward.
bool Engine::is_confirmed_later() const { return !running_.empty() || backward_ == BackwardState::kRunning || at::GradMode::is_enabled(); }

void Engine::refresh(Unit& unit, bool kept_is_outdated) {
  const auto lock = this->lock_for_use();
  guarded([&] { refresh_locked(unit, kept_is_outdated); });
}

/// Frees the unit's unsharded parameters, if they are present, unless they serve the next forward, too.
void Engine::refresh_locked(Unit& unit, bool kept_is_outdated) {
  if (unit.whole.use == UseState::kPinned) return;
  const auto last = unit.whole.last_backward;
  if (last == LastBackward::kGaveGradients) gatherer_.renew_extension(unit);
  if (last == LastBackward::kAccumulated) unit.whole.last_backward = LastBackward::kNone;
  const bool kept = unit.whole.use == UseState::kKept || unit.whole.use == UseState::kAttended;
  const auto& options = unit.options;
  if (!kept_is_outdated && (kept || !options.reshard_after_backward || options.after_forward == AfterForward::kAcrossForwards)) {
    if (!kept) set_use(unit, UseState::kUnused);
    return;
  }
  evict(unit);
  // If placements keep unsharded parameters or inner shards, the user has not asked to keep old values.
  // [Differences need a base] Another gather would change parameters, although the main ones are the same, so only noticed writes count.
  const bool by_placements =
      (unit.replicated_parameters() && !(unit.sends_differences() && unit.whole.is_base)) || options.outer_sharded_optimizer;
  if (kept_is_outdated || (by_placements && last != LastBackward::kAccumulated)) gatherer_.outdate_silently(unit);
}

void Engine::begin_unit_forward(Unit& unit) {
  const auto lock = this->lock();
  for (Unit* caller : running_) {
    // Not all ranks run the modules of an attended unit, and all have to know the same relations.
    const bool by_all = caller->whole.use != UseState::kAttended && unit.whole.use != UseState::kAttended;
    if (by_all && !related(*caller, unit)) caller->place.called.push_back(&unit);
  }
  running_.push_back(&unit);
}

bool Engine::end_unit_forward(Unit& unit) {
  const auto lock = this->lock();
  const auto last = std::find(running_.rbegin(), running_.rend(), &unit);
  if (last != running_.rend()) running_.erase(std::next(last).base());
  return std::find(running_.begin(), running_.end(), &unit) == running_.end();
}

void Engine::enter(std::span<Unit* const> units, Pass pass) {
  const auto lock = this->lock_for_use();
  if (!knows_grad_mode()) backward_may_follow_ = true;
  guarded([&] {
    for (Unit* unit : units) {
      if (unit->whole.in_use(pass)) continue;
      if (unit->attendance.skips && !unit->attendance.by_all) {
        throw Error("rank " + std::to_string(options_.mesh.rank()) + " uses unit '" + unit->name +
                    "', although it has called attend() with present = false for it, so that the other ranks do not wait for it; call "
                    "attend() with present = true on this rank, and on all ranks before each use");
      }
      move_to(*unit, units, pass);
    }
  });
}

void Engine::move_to(Unit& unit, std::span<Unit* const> together, Pass pass) {
  std::erase(ahead_, &unit);  // Also where it has stayed, or arrived meanwhile (flush_writes): read_ahead() must not evict what is in use.
  const bool within = current_ != nullptr && encloses(unit, *current_);
  if (within && unit.state() == ParameterState::kPresent) {
    occupy(unit, pass);  // back in an enclosing unit, which has stayed gathered: the enclosed unit stays, too
    prefetch_listed(unit);
    return;
  }
  if (current_ == nullptr && backward_ == BackwardState::kNone) {
    events_.forward_begins(units_);
    main_parameters_.refuse_torn();
    main_parameters_.validate();
  }
  events_.entered(unit, schedule_.pass());
  schedule_.move_to(unit.place.index);
  if (!within) depart_to(unit, together, pass);
  gatherer_.start(unit);
  if (unit.place.prefetch[static_cast<std::size_t>(schedule_.pass())].empty()) {
    read_ahead();
  } else {
    prefetch_listed(unit);
  }
  gatherer_.finish(unit);
  if (!is_confirmed_later()) confirm();
  occupy(unit, pass);
  if (!within) current_ = &unit;
}

/// The computation is in the unit now.
void Engine::occupy(Unit& unit, Pass pass) {
  if (observer_ != nullptr) observer_->entered(unit);
  const bool repeated = backward_ == BackwardState::kRunning && pass == Pass::kForward;
  set_use(unit, repeated ? UseState::kRepeated : UseState::kInUse);
  if (!contains(occupied_, unit)) occupied_.push_back(&unit);
  if (backward_ == BackwardState::kRunning) repeated ? reducer_.reenter(unit) : reducer_.enter(unit);
}

// [Evict by movement] In forward and backward alike: units that neither enclose the destination nor lie within it are taken to be finished.
// If the computation enters one again, it is gathered again.
void Engine::depart_to(Unit& destination, std::span<Unit* const> together, Pass pass) {
  if (backward_ == BackwardState::kRunning) reducer_.depart_to(destination, together, pass);
  for (std::size_t i = 0; i < occupied_.size();) {
    Unit& unit = *occupied_[i];
    if (related(unit, destination) || contains(together, unit)) {
      ++i;
      continue;
    }
    occupied_.erase(occupied_.begin() + static_cast<std::ptrdiff_t>(i));
    if (unit.whole.use == UseState::kAttended) {  // no backward follows
      set_use(unit, UseState::kUnused);
      gatherer_.evict(unit);
      continue;
    }
    // A unit that was pinned meanwhile stays.
    if (unit.whole.use == UseState::kInUse || unit.whole.use == UseState::kRepeated || unit.whole.use == UseState::kUnused) leave(unit);
  }
}

void Engine::leave_now(Unit& unit) {
  const auto lock = this->lock();
  if (std::erase(occupied_, &unit) == 0 || unit.whole.use == UseState::kPinned) return;
  guarded([&] { leave(unit); });
  if (current_ == &unit) current_ = unit.place.parent;
}

/// Leaves one unit. A unit that an option keeps after forward stays until backward has been in it.
void Engine::leave(Unit& unit) {
  const bool by_backward = backward_ == BackwardState::kRunning && unit.whole.use == UseState::kInUse;
  const bool by_forward = !by_backward && unit.whole.use != UseState::kRepeated;
  const bool reshards = by_backward ? unit.options.reshard_after_backward : unit.options.reshards_after_forward();
  const bool kept = by_forward && reshards && gatherer_.leave_forward(unit);
  set_use(unit, kept ? UseState::kKept : UseState::kLeft);
  if (reshards && !by_forward) gatherer_.evict(unit);
}

// [Read ahead] Units that were gathered on a prediction that no longer holds give their slots back first, so that memory stays bounded.
void Engine::read_ahead() {
  const auto expected = schedule_.next(prefetch_depth_);
  std::erase_if(ahead_, [&](Unit* unit) {
    if (std::find(expected.begin(), expected.end(), unit->place.index) != expected.end()) return false;
    gatherer_.evict(*unit);
    return true;
  });
  for (const auto index : expected) {
    Unit& unit = *units_[index];
    if (unit.state() != ParameterState::kSharded || !may_gather_ahead(unit)) continue;
    gatherer_.start(unit);
    ahead_.push_back(&unit);
  }
}

/// Starts what the user listed for the unit, in place of a prediction.
void Engine::prefetch_listed(Unit& unit) {
  for (const auto index : unit.place.prefetch[static_cast<std::size_t>(schedule_.pass())]) {
    Unit& listed = *units_[index];
    if (listed.state() == ParameterState::kPresent || !may_gather_ahead(listed)) continue;
    gatherer_.start(listed);
    std::erase(ahead_, &listed);
    if (listed.whole.use != UseState::kPinned) set_use(listed, UseState::kListed);
  }
}

void Engine::set_use(Unit& unit, UseState state) {
  const auto now = unit.whole.use.load();
  if (!may_follow(now, state)) {
    throw Error("internal: unit '" + unit.name + "' can't go from use state " + std::to_string(static_cast<int>(now)) + " to " +
                std::to_string(static_cast<int>(state)));
  }
  if (now == UseState::kKept) gatherer_.unkeep(unit);
  unit.whole.use = state;
}

/// Frees the unit, whatever it was kept for. The computation is not in it any more.
void Engine::evict(Unit& unit) {
  set_use(unit, UseState::kUnused);
  if (current_ == &unit) current_ = nullptr;
  std::erase(occupied_, &unit);
  std::erase(ahead_, &unit);
  gatherer_.evict(unit);
}

/// The main parameters were written. `starts_shards`: no forward begins at once, which would start these gathers.
void Engine::outdate_all(bool starts_shards) {
  main_parameters_.note_change();
  for (const auto& unit : units_) {
    set_use(*unit, UseState::kUnused);
    unit->attendance.forget_forwards();
    gatherer_.outdate_copies(*unit);
  }
  forget_moves();
  if (backward_ == BackwardState::kNone) {
    schedule_.begin(Pass::kForward);
    pools_.end_step();  // Where units stay gathered after backward, this is where a step ends.
  }
  if (!starts_shards) return;
  const at::NoGradGuard no_grad;
  guarded([&] {
    for (const auto& unit : units_) gatherer_.start_shards(*unit);
  });
}

/// Records that the computation is in no unit. The next unit that is entered begins a pass.
void Engine::forget_moves() {
  occupied_.clear();
  ahead_.clear();
  current_ = nullptr;
  backward_may_follow_ = false;
}

bool Engine::begin_backward(std::weak_ptr<void> alive, BackwardOf of) {
  const auto lock = this->lock_for_use();
  main_parameters_.refuse_retired();  // A graph may outlive the model.
  if (backward_ == BackwardState::kRunning) {
    if (!backward_alive_.expired()) return false;
    reset_locked();
  }
  main_parameters_.refuse_summoned("a backward");
  adds_to_gradients_ = reducer_.has_gradients();
  backward_ = BackwardState::kRunning;
  backward_alive_ = std::move(alive);
  events_.backward_began();
  // Units that forward was still in stay gathered, but backward has to enter them.
  bool has_lists = false;
  for (const auto& unit : units_) {
    if (unit->whole.use == UseState::kInUse || unit->whole.use == UseState::kLeft) set_use(*unit, UseState::kUnused);
    has_lists = has_lists || !unit->place.prefetch[static_cast<std::size_t>(Pass::kBackward)].empty();
  }
  schedule_.begin(Pass::kBackward);
  guarded([&] {
    reducer_.drain();  // what a backward that was not the last left
    reducer_.begin_backward(of == BackwardOf::kAllLeaves);
    if (!has_lists) read_ahead();
  });
  return true;
}

void Engine::gradient(Unit& unit, std::size_t parameter, const at::Tensor& gradient) {
  const auto lock = this->lock();
  const at::NoGradGuard no_grad;
  if (observer_ != nullptr) observer_->arrived(unit, parameter, gradient);
  guarded([&] { reducer_.collect(unit, parameter, gradient); });
}

void Engine::end_backward() {
  const auto lock = this->lock();
  const at::NoGradGuard no_grad;
  guarded([&] {
    reshard_after_backward();
    if (!facts_.manual_finalization) {
      reducer_.finish();
      if (facts_.is_last_backward || options_.report_nan_in_param_grad) reducer_.drain();
    }
    confirm();
  });
  backward_ = BackwardState::kNone;
  backward_alive_.reset();
  note_backward(facts_.is_last_backward && !facts_.manual_finalization);
  schedule_.begin(Pass::kForward);
  pools_.end_step();
  main_parameters_.validate();  // [Validate at the end]
  if (facts_.manual_finalization) return;
  reducer_.validate();
  guarded([&] { reducer_.report_nan(); });
}

/// This happens before the last reductions, whose staging needs the memory: the root's is often the largest.
void Engine::reshard_after_backward() {
  for (Unit* unit : ahead_) gatherer_.evict(*unit);
  for (const auto& unit : units_) {
    const bool attended = unit->whole.use == UseState::kAttended;
    // Backwards of other forwards follow one after which gradients are not complete.
    const bool is_last = facts_.is_last_backward && unit->options.requires_gradient_sync;
    if (is_last) unit->attendance.forget_forwards();
    if (unit->whole.use == UseState::kPinned || (attended && !is_last)) continue;
    if (unit->options.reshard_after_backward || attended || unit->whole.use == UseState::kListed) {
      set_use(*unit, UseState::kUnused);
      gatherer_.evict(*unit);
    } else if (unit->whole.use != UseState::kKept) {
      set_use(*unit, UseState::kUnused);
    }
  }
  forget_moves();
}

/// [Current when forward begins] `last`: whether this is the last backward before an update.
void Engine::note_backward(bool last) {
  bool gives = false;
  for (const auto& unit : units_) {
    const bool gave = last && unit->options.requires_gradient_sync && unit->options.updated_after_backward;
    unit->whole.last_backward = gave ? LastBackward::kGaveGradients : LastBackward::kAccumulated;
    gives = gives || gave;
  }
  events_.backward_ended(gives);
}

void Engine::finalize_backward(bool wait) {
  const auto lock = this->lock_for_use();
  const at::NoGradGuard no_grad;
  if (backward_ == BackwardState::kRunning) {
    if (!backward_alive_.expired()) throw Error("finalize_backward() inside of a backward; call it when the backward has ended");
    reset_locked();
  }
  note_backward(true);
  try {
    guarded([&] {
      reshard_after_backward();
      reducer_.finish();
      if (wait || options_.report_nan_in_param_grad) reducer_.drain();
      confirm();
    });
  } catch (...) {  // [Nothing survives an exception]
    reducer_.reset(/*took_all=*/true);
    throw;
  }
  pools_.end_step();
  reducer_.validate();
  guarded([&] { reducer_.report_nan(); });
}

void Engine::set_fixed_addresses(Unit& unit, bool fixed) {
  const auto lock = this->lock();
  unit.options.fixed_addresses = fixed;
  if (fixed || unit.replicated_parameters() || unit.state() != ParameterState::kSharded) return;
  unit.whole.free();
  if (unit.whole.extension) unit.whole.extension->free();
}

bool Engine::in_backward() {
  const auto lock = this->lock();
  return backward_ == BackwardState::kRunning && !backward_alive_.expired();
}

void Engine::recover() {
  const auto lock = this->lock();
  if (backward_ == BackwardState::kRunning && backward_alive_.expired()) reset_locked();
}

void Engine::unshard(Unit& unit, bool wait) {
  const auto lock = this->lock_for_use();
  bool attended = false;
  unit.attendance.skips = false;
  guarded([&] {
    attended = unshard_attended(unit);
    gatherer_.start(unit);
    if (!wait) return;
    gatherer_.finish(unit);
    if (!is_confirmed_later()) confirm();
  });
  if (!attended) set_use(unit, UseState::kPinned);  // [Pins last until use]
  std::erase(ahead_, &unit);
}

void Engine::reshard(Unit& unit) {
  const auto lock = this->lock();
  unit.attendance = {.optional = unit.attendance.optional, .divides_by_present = unit.attendance.divides_by_present};
  guarded([&] { evict(unit); });
}

void Engine::reset() {
  const auto lock = this->lock();
  reset_locked();
}

// A backward that failed leaves no gradients. Those that it had reduced already were added to the gradients of earlier backwards, and can't
// be separated from them.
void Engine::reset_locked() {
  const bool failed_backward = backward_ == BackwardState::kRunning;
  if (failed_backward && adds_to_gradients_) {
    TORCH_WARN(
        "fsdp: a backward failed, and the gradients of earlier backwards to which it was adding are dropped with it; start the "
        "accumulation again, or skip this step");
  }
  reducer_.reset(failed_backward || facts_.manual_finalization);  // which has reduced some units only
  drop_backward();
}

/// Frees all units: the computation is in none of them any more.
void Engine::drop_backward() {
  running_.clear();
  for (const auto& unit : units_) {
    gatherer_.drop(*unit);
    set_use(*unit, UseState::kUnused);
    unit->attendance.forget_forwards();
    unit->attendance.gives = false;
    gatherer_.evict(*unit);
  }
  forget_moves();
  backward_ = BackwardState::kNone;
  backward_alive_.reset();
  schedule_.begin(Pass::kForward);
}

void Engine::set(const StepSettings& settings) {
  if (settings.prefetch_depth && *settings.prefetch_depth < 0) {
    throw Error("prefetch_depth " + std::to_string(*settings.prefetch_depth) + "; give 0 (no read-ahead) or more");
  }
  const auto lock = this->lock();
  prefetch_depth_ = settings.prefetch_depth.value_or(prefetch_depth_);
  facts_.is_last_backward = settings.is_last_backward.value_or(facts_.is_last_backward);
  if (settings.ends_step) events_.set_ends_step(*settings.ends_step);
  facts_.manual_finalization = settings.manual_finalization.value_or(facts_.manual_finalization);
  if (settings.overlaps_reductions) reducer_.set_overlaps(*settings.overlaps_reductions);
  if (settings.buffer_memory) pools_.set_memory(units_, *settings.buffer_memory);
  if (settings.buffer_sources) pools_.set_sources(*settings.buffer_sources);
}

}  // namespace fsdp::engine
