#include "engine/engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

bool contains(std::span<Unit* const> units, const Unit& unit) { return std::find(units.begin(), units.end(), &unit) != units.end(); }

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      pool_(options.mesh.device(), accounting_),
      reducer_(options.mesh.device(), pool_, accounting_, {.rank = options.mesh.rank(), .report_nan = options.report_nan_in_param_grad}) {}

Engine::~Engine() {
  reducer_.drop(units_);
  for (const auto& unit : units_) {
    unit->gather.reset();  // waits
    unit->free_whole();
  }
}

Unit& Engine::add(std::unique_ptr<Unit> unit) {
  const std::lock_guard lock(mutex_);
  unit->index = units_.size();
  units_.push_back(std::move(unit));
  return *units_.back();
}

template <typename Body>
void Engine::guarded(const Body& body) {
  try {
    body();
  } catch (const CommError& error) {
    rethrow_with_history(error);
  }
}

void Engine::rethrow_with_history(const std::exception& error) const {
  std::string text = std::string(error.what()) + "; last units that this rank touched, newest first:";
  for (std::size_t i = 0; i < std::min(moves_, history_.size()); ++i) {
    text += (i == 0 ? " '" : ", '") + history_[(moves_ - 1 - i) % history_.size()]->name + "'";
  }
  throw CommError(text);
}

// One training step: touch, move_to, depart_to, ensure_present, read_ahead in forward; begin_backward, the same and gradient_ready in
// backward; end_backward.

void Engine::touch(std::span<Unit* const> units) {
  const std::lock_guard lock(mutex_);
  guarded([&] {
    for (Unit* unit : units) {
      if (!unit->hot) move_to(*unit, units);
    }
  });
}

void Engine::move_to(Unit& unit, std::span<Unit* const> together) {
  const bool within = current_ != nullptr && encloses(unit, *current_);
  if (within && unit.state == ParameterState::kPresent) {
    unit.hot = true;  // back in an enclosing unit, which has stayed: the enclosed one stays as well
    return;
  }
  if (current_ == nullptr && backward_ == BackwardState::kNone) validate_parameters();
  history_[moves_++ % history_.size()] = &unit;
  schedule_.move_to(unit.index);
  if (!within) depart_to(unit, together);
  start_gather(unit);
  read_ahead();
  ensure_present(unit);
  unit.hot = true;
  if (!within) current_ = &unit;
}

// [Evict by movement] In forward and backward alike: what is neither around nor within the destination has done its work. If it has not,
// touching it again gathers it again. What forward kept (no reshard_after_forward) has work before it until backward has been in it: until
// then it is not hot.
void Engine::depart_to(Unit& destination, std::span<Unit* const> together) {
  if (backward_ == BackwardState::kRunning) reducer_.depart_to(destination);
  for (const auto& unit : units_) {
    if (unit->state != ParameterState::kPresent || related(*unit, destination) || contains(together, *unit)) continue;
    const bool was_used = unit->hot.exchange(false);
    if (backward_ == BackwardState::kNone) {
      if (unit->options.reshard_after_forward && !fits_the_budget(*unit)) evict_after_forward(*unit);
    } else if (((unit->options.reshard_after_forward && !unit->kept) || was_used) && unit->options.reshard_after_backward) {
      evict(*unit);
    }
  }
}

/// True if the unit may stay gathered after its forward, and is entered as kept.
bool Engine::fits_the_budget(Unit& unit) {
  if (unit.kept) return true;
  if (unit.replicated_parameters() || kept_bytes_ + unit.full.bytes > options_.keep_gathered_bytes) return false;
  unit.kept = true;
  kept_bytes_ += unit.full.bytes;
  return true;
}

void Engine::start_gather(Unit& unit) {
  if (unit.state != ParameterState::kSharded) return;
  const at::NoGradGuard no_grad;
  if (!unit.replicated_parameters()) unit.full.acquire(pool_, memory::Kind::kGatheredParameters);
  std::vector<comm::GatherPiece> pieces;
  if (unit.post_forward.live()) {
    for (std::size_t k = 0; k < unit.full.parts.size(); ++k)
      pieces.push_back({.full = unit.full.parts[k], .shard = unit.post_forward.parts[k]});
    unit.gather = unit.groups.post_forward->all_gather(pieces, {.operation = "all-gather after forward", .unit = unit.name});
  } else {
    unit.wire.acquire(pool_, memory::Kind::kCommunication);
    if (unit.options.outer_sharded_optimizer) finish_shards(unit);
    for (std::size_t k = 0; k < unit.full.parts.size(); ++k) pieces.push_back(piece_to_gather(unit, k));
    if (!unit.replicated_optimizer()) unit.gather = unit.groups.gather->all_gather(pieces, {.operation = "all-gather", .unit = unit.name});
  }
  unit.state = ParameterState::kGathering;
}

/// What travels of sub-buffer k: this rank's main parameters as they are if possible, else converted into its place among the others'.
comm::GatherPiece Engine::piece_to_gather(Unit& unit, std::size_t k) {
  const auto& format = unit.formats[k];
  const at::Tensor& full = format.gather ? unit.wire.parts[k] : unit.full.parts[k];
  if (unit.options.outer_sharded_optimizer) return {.full = full, .shard = unit.shards.parts[k]};
  if (unit.main_is_shared(k) && unit.replicated_optimizer()) return {.full = full, .shard = full};
  if (format.gathers_main() && !unit.offloaded()) return {.full = full, .shard = unit.main[k]};
  const auto place = Unit::region(full, unit.all_pieces(), unit.main_pieces());
  convert_main(unit, k, place);
  return {.full = full, .shard = place};
}

/// The main parameters of sub-buffer k, as they travel.
void Engine::convert_main(Unit& unit, std::size_t k, const at::Tensor& place) {
  const auto& gather = unit.formats[k].gather;
  if (!gather) {
    place.copy_(unit.main[k], /*non_blocking=*/true);
  } else if (place.numel() > 0) {
    const auto pieces = unit.main_pieces().count;
    gather->pre_all_gather(unit.main[k].to(device(), /*non_blocking=*/true).view({pieces, -1}), place.view({pieces, -1}));
  }
}

// The hop over the outer dimension that precedes the first gather after an update. [Order is collective] All units start it together after
// an optimizer step, and one alone after an operator wrote to it.
void Engine::start_shards(Unit& unit) {
  if (!std::exchange(unit.shards_outdated, false)) return;
  unit.shards_gather.reset();
  std::vector<comm::GatherPiece> pieces;
  for (std::size_t k = 0; k < unit.main.size(); ++k) {
    const auto own = Unit::region(unit.shards.parts[k], unit.inner_pieces(), unit.main_pieces());
    if (!unit.main_is_shared(k)) convert_main(unit, k, own);
    pieces.push_back({.full = unit.shards.parts[k], .shard = own});
  }
  unit.shards_gather = unit.groups.outer->all_gather(pieces, {.operation = "outer all-gather", .unit = unit.name});
}

void Engine::finish_shards(Unit& unit) {
  start_shards(unit);
  if (!unit.shards_gather) return;
  unit.shards_gather->wait();
  unit.shards_gather.reset();
}

void Engine::ensure_present(Unit& unit) {
  start_gather(unit);
  if (unit.state != ParameterState::kGathering) return;
  if (unit.gather) unit.gather->wait();
  unit.gather.reset();
  if (unit.post_forward.live()) {
    unit.post_forward.release();
  } else {
    widen(unit);
  }
  unit.state = ParameterState::kPresent;
}

/// Converts what arrived in a gather format.
void Engine::widen(Unit& unit) {
  const at::NoGradGuard no_grad;
  const auto pieces = unit.all_pieces().count;
  for (std::size_t k = 0; k < unit.full.parts.size(); ++k) {
    const auto& gather = unit.formats[k].gather;
    const auto& full = unit.full.parts[k];
    if (gather && full.numel() > 0) gather->post_all_gather(unit.wire.parts[k].view({pieces, -1}), full.view({pieces, -1}));
  }
  unit.wire.release();
}

/// What the user listed for the current unit, else what the schedule expects.
std::vector<std::size_t> Engine::expected_next() const {
  if (current_ != nullptr) {
    const auto& listed = current_->prefetch[static_cast<std::size_t>(schedule_.phase())];
    if (!listed.empty()) return listed;
  }
  return schedule_.next(options_.prefetch_depth);
}

// [Read ahead] What was gathered on a prediction that no longer holds gives its slot back first, so that memory stays bounded.
void Engine::read_ahead() {
  const auto expected = expected_next();
  const std::size_t now = moves_ == 0 ? Schedule::kNone : history_[(moves_ - 1) % history_.size()]->index;
  for (const auto& unit : units_) {
    if (unit->state == ParameterState::kGathering && unit->index != now &&
        std::find(expected.begin(), expected.end(), unit->index) == expected.end()) {
      evict(*unit);
    }
  }
  for (const auto index : expected) start_gather(*units_[index]);
}

void Engine::evict(Unit& unit) {
  unit.hot = false;
  if (std::exchange(unit.kept, false)) kept_bytes_ -= unit.full.bytes;
  if (unit.state == ParameterState::kSharded) return;
  if (unit.state == ParameterState::kGathering) ensure_present(unit);
  write_back(unit);
  if (unit.replicated_parameters()) return;
  unit.free_whole();
  unit.state = ParameterState::kSharded;
}

/// Evicts a unit whose forward is over; where neighbours keep a copy between them, this rank keeps its part.
void Engine::evict_after_forward(Unit& unit) {
  const auto& neighbours = unit.groups.post_forward;
  if (neighbours && unit.state == ParameterState::kPresent) {
    write_back(unit);
    unit.post_forward.acquire(pool_, memory::Kind::kGatheredParameters);
    const at::NoGradGuard no_grad;
    for (std::size_t k = 0; k < unit.full.parts.size(); ++k) {
      const auto& full = unit.full.parts[k];
      unit.post_forward.parts[k].copy_(Unit::region(full, {0, neighbours->size()}, {neighbours->rank(), 1}));
    }
  }
  evict(unit);
}

void Engine::write_back(Unit& unit) {
  if (!std::exchange(unit.written, false)) return;
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < unit.main.size(); ++k) {
    if (unit.replicated_parameters() && unit.main_is_shared(k)) continue;
    const auto written = Unit::region(unit.full.parts[k], unit.all_pieces(), unit.main_pieces());
    if (unit.formats[k].gathers_main()) {
      unit.main[k].copy_(written);
      continue;
    }
    // Where the operator changed nothing, the main parameters keep the digits that the whole ones do not have.
    const auto before = as_gathered(unit, k);
    const auto main = unit.main[k].to(device());
    unit.main[k].copy_(at::where(written == before, main, written.to(main.scalar_type())));
  }
  unit.shards_outdated = unit.options.outer_sharded_optimizer;
}

/// What a gather would bring of this rank's main parameters of sub-buffer k.
at::Tensor Engine::as_gathered(Unit& unit, std::size_t k) {
  const auto& format = unit.formats[k];
  if (!format.gather) return unit.main[k].to(device()).to(format.compute);
  const auto pieces = unit.main_pieces().count;
  const auto gathered = at::empty({unit.main[k].numel()}, unit.full.parts[k].options());
  if (gathered.numel() == 0) return gathered;
  const auto wire = at::empty({unit.travelling_numel(k) * pieces}, gathered.options().dtype(at::kByte));
  convert_main(unit, k, wire);
  format.gather->post_all_gather(wire.view({pieces, -1}), gathered.view({pieces, -1}));
  return gathered;
}

void Engine::wrote(Unit& unit) {
  const std::lock_guard lock(mutex_);
  unit.written = true;
}

void Engine::begin_backward(std::weak_ptr<void> alive) {
  const std::lock_guard lock(mutex_);
  if (backward_ == BackwardState::kRunning) {
    if (!backward_alive_.expired()) return;
    reset_locked();
  }
  refuse_summoned("a backward");
  backward_ = BackwardState::kRunning;
  backward_alive_ = std::move(alive);
  for (const auto& unit : units_) unit->collected_in_this_backward = false;
  schedule_.begin(Phase::kBackward);
  guarded([&] {
    reducer_.drain();  // what a backward that was not the last left
    read_ahead();
  });
}

void Engine::gradient_ready(Unit& unit, std::size_t parameter, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  guarded([&] { reducer_.collect(unit, parameter, gradient); });
}

void Engine::end_backward() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  guarded([&] {
    // Before the last reductions, whose staging needs the room: the root's is often the largest.
    for (const auto& unit : units_) {
      unit->hot = false;
      if (unit->options.reshard_after_backward) evict(*unit);
    }
    current_ = nullptr;
    reducer_.finish(units_);
    if (is_last_backward_ || options_.report_nan_in_param_grad) reducer_.drain();
  });
  backward_ = BackwardState::kNone;
  backward_alive_.reset();
  schedule_.begin(Phase::kForward);
  pool_.end_step();
  validate();
  if (options_.report_nan_in_param_grad) guarded([&] { reducer_.report_nan(units_); });
}

bool Engine::in_backward() {
  const std::lock_guard lock(mutex_);
  return backward_ == BackwardState::kRunning && !backward_alive_.expired();
}

void Engine::recover() {
  const std::lock_guard lock(mutex_);
  if (backward_ == BackwardState::kRunning && backward_alive_.expired()) reset_locked();
}

// [Validate at the end]
void Engine::validate() const {
  for (const auto& unit : units_) {
    if (unit->options.requires_gradient_sync && unit->gradient_state == GradientState::kCollecting) {
      throw Error("internal: unit '" + unit->name + "' has unreduced gradients after backward");
    }
  }
  validate_parameters();
}

void Engine::validate_parameters() const {
  for (const auto& unit : units_) {
    if (unit->summoned) continue;
    for (const auto& parameter : unit->parameters) {
      const auto tensor = parameter.tensor.lock();
      if (tensor && tensor->storage().unsafeGetStorageImpl() != unit->full.storage.unsafeGetStorageImpl()) {
        throw Error("parameter '" + parameter.name + "' of unit '" + unit->name +
                    "' was given other memory after fully_shard (set_data, or the module's to(dtype) or to(device)); call "
                    "fsdp::fully_unshard first, convert, and shard again");
      }
    }
  }
}

void Engine::evict_all() {
  for (const auto& unit : units_) evict(*unit);
  current_ = nullptr;
}

void Engine::unshard(Unit& unit) {
  const std::lock_guard lock(mutex_);
  guarded([&] { ensure_present(unit); });
}

void Engine::start_unshard(Unit& unit) {
  const std::lock_guard lock(mutex_);
  guarded([&] { start_gather(unit); });
}

void Engine::reshard(Unit& unit) {
  const std::lock_guard lock(mutex_);
  guarded([&] { evict(unit); });
  if (current_ == &unit) current_ = nullptr;
}

void Engine::reset() {
  const std::lock_guard lock(mutex_);
  reset_locked();
}

void Engine::reset_locked() {
  reducer_.drop(units_);
  for (const auto& unit : units_) {
    if (unit->state == ParameterState::kGathering) {
      unit->gather.reset();  // waits; a failed peer's error was reported where it was first seen
      unit->wire.release();
      unit->state = unit->replicated_parameters() ? ParameterState::kSharded : ParameterState::kPresent;
    }
  }
  evict_all();
  backward_ = BackwardState::kNone;
  backward_alive_.reset();
  schedule_.begin(Phase::kForward);
}

void Engine::zero_grad() {
  const std::lock_guard lock(mutex_);
  if (backward_ == BackwardState::kRunning && backward_alive_.expired()) reset_locked();
  if (backward_ == BackwardState::kNone) {
    guarded([&] { reducer_.drain(); });
    reducer_.drop(units_);
  }
  for (const auto& unit : units_) reducer_.zero_grad(*unit);
}

void Engine::flush_writes() {
  const std::lock_guard lock(mutex_);
  if (retired_) {
    throw Error(
        "this handle or optimizer belongs to a model that fsdp::fully_unshard made ordinary again; call fully_shard and make a new one");
  }
  refuse_summoned("this handle or optimizer is used");
  for (const auto& unit : units_) write_back(*unit);
  // The caller may write to what is being copied to the device.
  if (std::any_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->offloaded(); })) memory::synchronize(device());
}

std::vector<at::Tensor> Engine::gather_main(Unit& unit, std::span<const at::Tensor> main) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole;
  std::vector<comm::GatherPiece> outer;
  std::vector<comm::GatherPiece> inner;
  for (const auto& part : main) {
    const auto numel = part.numel() / unit.main_pieces().count * unit.all_pieces().count;
    const auto& full = whole.emplace_back(at::empty({numel}, part.options().device(device())));
    const auto own = Unit::region(full, unit.all_pieces(), unit.main_pieces());
    const auto shard = Unit::region(full, unit.all_pieces(), unit.inner_pieces());
    own.copy_(part);
    outer.push_back({.full = shard, .shard = own});
    inner.push_back({.full = full, .shard = shard});
  }
  guarded([&] {
    const comm::Label label{.operation = "all-gather of main parameters or gradients", .unit = unit.name};
    if (unit.options.outer_sharded_optimizer) unit.groups.outer->all_gather(outer, label)->wait();
    if (!unit.replicated_optimizer()) unit.groups.gather->all_gather(inner, label)->wait();
  });
  return whole;
}

std::vector<at::Tensor> Engine::summon(Unit& unit) {
  {
    const std::lock_guard lock(mutex_);
    write_back(unit);
  }
  auto whole = gather_main(unit, unit.main);
  const std::lock_guard lock(mutex_);
  unit.summoned = true;
  return whole;
}

void Engine::dismiss(Unit& unit, std::span<const at::Tensor> whole) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  unit.summoned = false;
  if (whole.empty()) return;
  if (unit.offloaded()) memory::synchronize(device());  // the main parameters may be on their way to the device
  for (std::size_t k = 0; k < whole.size(); ++k) unit.main[k].copy_(Unit::region(whole[k], unit.all_pieces(), unit.main_pieces()));
  guarded([&] { outdate_copies(unit); });
  if (current_ == &unit) current_ = nullptr;
}

void Engine::refuse_summoned(const char* what) const {
  for (const auto& unit : units_) {
    if (unit->summoned) {
      throw Error(std::string(what) + " while SummonFullParams keeps unit '" + unit->name + "' whole; end the guard's scope first");
    }
  }
}

/// The main parameters of a unit were written.
void Engine::outdate_copies(Unit& unit) {
  unit.written = false;
  evict(unit);
  // Replicas are not freed, but outdated where another rank owns the change or the main parameters are others.
  if (unit.replicated_parameters() && (!unit.replicated_optimizer() || unit.has_separate_main())) unit.state = ParameterState::kSharded;
  unit.post_forward.release();
  unit.shards_outdated = unit.options.outer_sharded_optimizer;
  for (const auto& parameter : unit.parameters) {
    if (const auto tensor = parameter.tensor.lock()) tensor->bump_version();
  }
}

void Engine::main_shards_changed() {
  {
    const std::lock_guard lock(mutex_);
    guarded([&] {
      for (const auto& unit : units_) {
        if (!unit->replicated_optimizer()) continue;
        std::vector<comm::GatherPiece> pieces;
        for (const auto& main : unit->main) {
          const auto whole = main.to(device());  // itself, unless it is offloaded
          pieces.push_back({.full = whole, .shard = unit->main_region(whole, unit->inner_pieces())});
        }
        unit->groups.gather->all_gather(pieces, {.operation = "all-gather of shards", .unit = unit->name})->wait();
        for (std::size_t k = 0; k < pieces.size(); ++k) unit->main[k].copy_(pieces[k].full);
      }
    });
  }
  main_parameters_changed();
}

void Engine::main_parameters_changed() {
  const std::lock_guard lock(mutex_);
  for (const auto& unit : units_) outdate_copies(*unit);
  current_ = nullptr;
  if (backward_ == BackwardState::kNone) schedule_.begin(Phase::kForward);
  const at::NoGradGuard no_grad;
  guarded([&] {
    for (const auto& unit : units_) start_shards(*unit);
  });
}

void Engine::finish_gradient_sync() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  guarded([&] { reducer_.drain(); });
}

void Engine::check_parameters() {
  const std::lock_guard lock(mutex_);
  validate_parameters();
}

void Engine::retire() {
  const std::lock_guard lock(mutex_);
  retired_ = true;
}

void Engine::set_prefetch_depth(int depth) {
  if (depth < 0) throw Error("prefetch_depth " + std::to_string(depth) + "; give 0 (no read-ahead) or more");
  const std::lock_guard lock(mutex_);
  options_.prefetch_depth = depth;
}

}  // namespace fsdp::engine
