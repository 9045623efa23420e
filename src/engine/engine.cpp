#include "engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "fsdp/error.h"
#include "memory/device_memory.h"

namespace fsdp::engine {
namespace {

bool contains(std::span<Unit* const> units, const Unit& unit) { return std::find(units.begin(), units.end(), &unit) != units.end(); }

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      pool_(options.mesh.device(), accounting_),
      gatherer_(options.mesh.device(), pool_, options.keep_gathered_bytes),
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
  if (current_ == nullptr && backward_ == BackwardState::kNone) {
    refuse_torn();
    validate_parameters();
  }
  history_[moves_++ % history_.size()] = &unit;
  schedule_.move_to(unit.index);
  if (!within) depart_to(unit, together);
  gatherer_.start(unit);
  read_ahead();
  gatherer_.finish(unit);
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
      if (unit->options.reshard_after_forward) gatherer_.leave_forward(*unit);
    } else if (((unit->options.reshard_after_forward && !unit->kept) || was_used) && unit->options.reshard_after_backward) {
      gatherer_.evict(*unit);
    }
  }
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
      gatherer_.evict(*unit);
    }
  }
  for (const auto index : expected) gatherer_.start(*units_[index]);
}

void Engine::wrote(Unit& unit) {
  const std::lock_guard lock(mutex_);
  wait_for_reader();  // The write-back may follow at any time.
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
      if (unit->options.reshard_after_backward) gatherer_.evict(*unit);
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
  for (const auto& unit : units_) gatherer_.evict(*unit);
  current_ = nullptr;
}

void Engine::unshard(Unit& unit) {
  const std::lock_guard lock(mutex_);
  guarded([&] { gatherer_.finish(unit); });
}

void Engine::start_unshard(Unit& unit) {
  const std::lock_guard lock(mutex_);
  guarded([&] { gatherer_.start(unit); });
}

void Engine::reshard(Unit& unit) {
  const std::lock_guard lock(mutex_);
  guarded([&] { gatherer_.evict(unit); });
  if (current_ == &unit) current_ = nullptr;
}

void Engine::reset() {
  const std::lock_guard lock(mutex_);
  reset_locked();
}

void Engine::reset_locked() {
  reducer_.drop(units_);
  for (const auto& unit : units_) gatherer_.drop(*unit);
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

void Engine::check_parameters() {
  const std::lock_guard lock(mutex_);
  validate_parameters();
}

void Engine::flush_writes() {
  const std::lock_guard lock(mutex_);
  refuse_torn();
  flush_writes_locked();
}

void Engine::prepare_load() {
  const std::lock_guard lock(mutex_);
  flush_writes_locked();
}

void Engine::set_torn(bool torn) {
  const std::lock_guard lock(mutex_);
  torn_ = torn;
}

void Engine::refuse_torn() const {
  if (torn_) throw Error("a load of this model failed halfway, so that its values belong to no checkpoint; load again before it is used");
}

void Engine::flush_writes_locked() {
  if (retired_) {
    throw Error(
        "this handle or optimizer belongs to a model that fsdp::fully_unshard made ordinary again; call fully_shard and make a new one");
  }
  refuse_summoned("this handle or optimizer is used");
  wait_for_reader();
  for (const auto& unit : units_) gatherer_.write_back(*unit);
  // The caller may write to what is being copied to the device.
  if (std::any_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->offloaded(); })) memory::synchronize(device());
}

void Engine::set_reader(std::future<void> read) {
  const std::lock_guard lock(mutex_);
  wait_for_reader();
  reader_ = std::move(read);
}

// [Writers wait for the reader] The reader needs nothing of the engine, so that waiting under the lock ends. Present whole parameters may
// be written meanwhile: where they are the main parameters themselves, it does not read them.
void Engine::wait_for_reader() {
  if (!reader_.valid()) return;
  reader_.wait();
  reader_ = {};
}

std::vector<at::Tensor> Engine::gather_main(Unit& unit, std::span<const at::Tensor> main) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole;
  guarded([&] { whole = gatherer_.gather_main(unit, main); });
  return whole;
}

std::vector<at::Tensor> Engine::summon(Unit& unit) {
  {
    const std::lock_guard lock(mutex_);
    gatherer_.write_back(unit);
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
  wait_for_reader();
  if (unit.offloaded()) memory::synchronize(device());  // the main parameters may be on their way to the device
  for (std::size_t k = 0; k < whole.size(); ++k) unit.main[k].copy_(Unit::region(whole[k], unit.all_pieces(), unit.main_pieces()));
  guarded([&] { gatherer_.outdate_copies(unit); });
  if (current_ == &unit) current_ = nullptr;
}

void Engine::refuse_summoned(const char* what) const {
  for (const auto& unit : units_) {
    if (unit->summoned) {
      throw Error(std::string(what) + " while SummonFullParams keeps unit '" + unit->name + "' whole; end the guard's scope first");
    }
  }
}

void Engine::main_shards_changed() {
  {
    const std::lock_guard lock(mutex_);
    wait_for_reader();
    guarded([&] {
      for (const auto& unit : units_) {
        if (unit->replicated_optimizer()) gatherer_.exchange_main(*unit);
      }
    });
  }
  main_parameters_changed();
}

void Engine::main_parameters_changed() {
  const std::lock_guard lock(mutex_);
  for (const auto& unit : units_) gatherer_.outdate_copies(*unit);
  current_ = nullptr;
  if (backward_ == BackwardState::kNone) schedule_.begin(Phase::kForward);
  const at::NoGradGuard no_grad;
  guarded([&] {
    for (const auto& unit : units_) gatherer_.start_shards(*unit);
  });
}

void Engine::finish_gradient_sync() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  guarded([&] { reducer_.drain(); });
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
