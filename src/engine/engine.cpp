#include "engine/engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "fsdp/error.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

bool contains(std::span<Unit* const> units, const Unit& unit) { return std::find(units.begin(), units.end(), &unit) != units.end(); }

}  // namespace

Engine::Engine(c10::Device device, int prefetch_depth)
    : device_(device), prefetch_depth_(prefetch_depth), pool_(device, accounting_), reducer_(pool_, accounting_) {}

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
  if (backward_ == BackwardState::kRunning && requires_gradient_sync_) reducer_.depart_to(destination);
  for (const auto& unit : units_) {
    if (unit->state != ParameterState::kPresent || related(*unit, destination) || contains(together, *unit)) continue;
    const bool was_used = unit->hot.exchange(false);
    if (unit->options.reshard_after_forward || (was_used && backward_ == BackwardState::kRunning)) evict(*unit);
  }
}

void Engine::start_gather(Unit& unit) {
  if (unit.state != ParameterState::kSharded) return;
  if (!unit.replicated_parameters()) {
    unit.slot = pool_.acquire(unit.layout.full_bytes(), memory::Kind::kGatheredParameters);
    memory::attach(*unit.storage.unsafeGetStorageImpl(), unit.slot);
  }
  std::vector<comm::GatherPiece> pieces;
  pieces.reserve(unit.full.size());
  for (std::size_t k = 0; k < unit.full.size(); ++k) pieces.push_back({.full = unit.full[k], .shard = unit.main[k]});
  unit.gather = unit.communicator->all_gather(pieces, {.operation = "all-gather", .unit = unit.name});
  unit.state = ParameterState::kGathering;
}

void Engine::ensure_present(Unit& unit) {
  start_gather(unit);
  if (unit.state != ParameterState::kGathering) return;
  unit.gather->wait();
  unit.gather.reset();
  unit.state = ParameterState::kPresent;
}

// [Read ahead] What was gathered on a prediction that no longer holds gives its slot back first, so that memory stays bounded.
void Engine::read_ahead() {
  const auto expected = schedule_.next(prefetch_depth_);
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
  if (unit.state == ParameterState::kSharded) return;
  if (unit.state == ParameterState::kGathering) ensure_present(unit);
  write_back(unit);
  if (unit.replicated_parameters()) return;
  unit.free_whole();
  unit.state = ParameterState::kSharded;
}

void Engine::write_back(Unit& unit) {
  if (!std::exchange(unit.written, false) || unit.replicated_parameters()) return;
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < unit.main.size(); ++k) unit.main[k].copy_(unit.own_region(unit.full[k], k));
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
  backward_ = BackwardState::kRunning;
  backward_alive_ = std::move(alive);
  for (const auto& unit : units_) unit->collected_in_this_backward = false;
  schedule_.begin(Phase::kBackward);
  guarded([&] { read_ahead(); });
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
    evict_all();  // before the last reductions, whose staging needs the room: the root's is often the largest
    if (requires_gradient_sync_) reducer_.finish(units_);
  });
  backward_ = BackwardState::kNone;
  backward_alive_.reset();
  schedule_.begin(Phase::kForward);
  validate();
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
    if (unit->gradient_state == GradientState::kReducing || (requires_gradient_sync_ && unit->gradient_state != GradientState::kNone)) {
      throw Error("internal: unit '" + unit->name + "' has unreduced gradients after backward");
    }
    for (const auto& parameter : unit->parameters) {
      const auto tensor = parameter.tensor.lock();
      if (tensor && tensor->storage().unsafeGetStorageImpl() != unit->storage.unsafeGetStorageImpl()) {
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
  if (backward_ == BackwardState::kNone) reducer_.drop(units_);
  for (const auto& unit : units_) reducer_.zero_grad(*unit);
}

void Engine::flush_writes() {
  const std::lock_guard lock(mutex_);
  if (retired_) {
    throw Error(
        "this handle or optimizer belongs to a model that fsdp::fully_unshard made ordinary again; call fully_shard and make a new one");
  }
  for (const auto& unit : units_) write_back(*unit);
}

void Engine::main_parameters_changed() {
  const std::lock_guard lock(mutex_);
  for (const auto& unit : units_) {
    unit->written = false;
    evict(*unit);
    // Replicas are not freed, but outdated where another rank owns the change.
    if (unit->replicated_parameters() && !unit->replicated_optimizer()) unit->state = ParameterState::kSharded;
    for (const auto& parameter : unit->parameters) {
      if (const auto tensor = parameter.tensor.lock()) tensor->bump_version();
    }
  }
  current_ = nullptr;
  if (backward_ == BackwardState::kNone) schedule_.begin(Phase::kForward);
}

void Engine::retire() {
  const std::lock_guard lock(mutex_);
  retired_ = true;
}

void Engine::set_prefetch_depth(int depth) {
  if (depth < 0) throw Error("prefetch_depth " + std::to_string(depth) + "; give 0 (no read-ahead) or more");
  const std::lock_guard lock(mutex_);
  prefetch_depth_ = depth;
}

}  // namespace fsdp::engine
