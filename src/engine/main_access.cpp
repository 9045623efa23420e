#include "engine/main_access.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <thread>
#include <utility>

#include "engine/engine.h"
#include "fsdp/error.h"

namespace fsdp::engine {

void MainAccess::check_parameters() const {
  const auto lock = engine_.lock();
  engine_.main_parameters_.refuse_retired();
  engine_.main_parameters_.validate();
}

void MainAccess::flush_writes() const {
  const auto lock = engine_.after_reader(engine_.lock_for_use());
  engine_.main_parameters_.refuse_torn();
  engine_.guarded([&] { engine_.main_parameters_.flush_writes(); });
}

void MainAccess::prepare_load() const {
  const auto lock = engine_.after_reader(engine_.lock_for_use());
  engine_.guarded([&] { engine_.main_parameters_.flush_writes(); });
}

void MainAccess::set_reader(std::future<void> read, std::thread::id thread) const {
  const auto lock = engine_.after_reader(engine_.lock());
  engine_.main_parameters_.set_reader(std::move(read), thread);
}

void MainAccess::expose() const {
  const auto lock = engine_.lock();
  engine_.main_parameters_.expose();
}

bool MainAccess::is_exposed() const {
  const auto lock = engine_.lock();
  return engine_.main_parameters_.exposed();
}

void MainAccess::set_torn(std::set<std::string> names) const {
  const auto lock = engine_.lock();
  engine_.main_parameters_.set_torn(std::move(names));
}

std::set<std::string> MainAccess::torn() const {
  const auto lock = engine_.lock();
  return engine_.main_parameters_.torn();
}

bool MainAccess::may_be_lost() const {
  const auto lock = engine_.lock();
  return engine_.main_parameters_.may_be_lost();
}

std::vector<at::Tensor> MainAccess::gather_main(Unit& unit, std::span<const at::Tensor> main) const {
  const auto lock = engine_.lock_for_use();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole;
  engine_.guarded([&] { whole = engine_.gatherer_.gather_main(unit, main); });
  return whole;
}

std::vector<at::Tensor> MainAccess::summon(Unit& unit) const {
  const auto lock = engine_.after_reader(engine_.lock_for_use());  // dismiss() writes, and no reading begins before it.
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole;
  engine_.guarded([&] { whole = engine_.main_parameters_.summon(unit); });
  return whole;
}

void MainAccess::dismiss(Unit& unit, std::span<const at::Tensor> whole) const {
  const auto lock = engine_.lock();
  const at::NoGradGuard no_grad;
  engine_.guarded([&] {
    if (!engine_.main_parameters_.dismiss(unit, whole)) return;
    engine_.gatherer_.outdate_copies(unit);
    engine_.evict(unit);
  });
}

void MainAccess::wrote(Unit& unit) const {
  const auto lock = engine_.after_reader(engine_.lock());  // The write-back may follow at any time.
  engine_.main_parameters_.changed();
  unit.whole.written = true;
}

void MainAccess::changed(bool forward_begins) const {
  const auto lock = engine_.lock_for_use();
  engine_.outdate_all(/*starts_shards=*/!forward_begins);
}

void MainAccess::shards_changed() const {
  const auto lock = engine_.after_reader(engine_.lock_for_use());
  engine_.guarded([&] { engine_.main_parameters_.exchange_shards(); });
  engine_.outdate_all(/*starts_shards=*/true);
}

void MainAccess::retire() const {
  const auto lock = engine_.lock();
  engine_.main_parameters_.retire();
}

bool MainAccess::is_retired() const {
  const auto lock = engine_.lock();
  return engine_.main_parameters_.is_retired();
}

void MainAccess::tell_update(std::uint64_t by, std::string settings) const {
  const auto lock = engine_.lock();
  engine_.facts_.tell_update(by, std::move(settings));
}

void MainAccess::rejoin_streams() const {
  const auto lock = engine_.lock();
  engine_.stream_.rejoin();
}

void MainAccess::exclusively(const std::function<void()>& work) const {
  const auto lock = engine_.lock();
  engine_.guarded(work);
}

void MainAccess::set_export(std::function<std::string()> end) const { engine_.end_export_ = std::move(end); }

void MainAccess::refuse_export() const { const auto lock = engine_.lock_for_use(); }

void MainAccess::finish_gradient_sync() const {
  const auto lock = engine_.lock();
  const at::NoGradGuard no_grad;
  try {
    engine_.guarded([&] {
      engine_.reducer_.drain();
      engine_.confirm();
    });
  } catch (...) {  // [Nothing survives an exception]
    engine_.reducer_.reset(/*took_all=*/true);
    throw;
  }
}

std::vector<at::Tensor> MainAccess::take_gradients(Unit& unit) const {
  const auto lock = engine_.lock();
  return engine_.reducer_.take_main_gradient(unit);
}

void MainAccess::zero_grad() const {
  const auto lock = engine_.lock();
  if (engine_.backward_ == BackwardState::kRunning) {
    if (!engine_.backward_alive_.expired()) {
      throw Error(
          "zero_grad() inside of a backward, whose gradients are on their way into the memory that it would free; call it before backward "
          "begins or after it has ended");
    }
    engine_.adds_to_gradients_ = false;  // They are to be dropped anyway.
    engine_.reset_locked();
  }
  engine_.guarded([&] { engine_.reducer_.drain(); });
  engine_.reducer_.drop();
  engine_.reducer_.zero_grad();
}

}  // namespace fsdp::engine
