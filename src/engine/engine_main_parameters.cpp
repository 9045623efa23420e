// What users do to a model's main parameters, and who takes its units or gradients, through Engine: see engine.h. The training step is in
// engine.cpp.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "engine/engine.h"

namespace fsdp::engine {

void Engine::check_parameters() {
  const auto lock = this->lock();
  main_parameters_.refuse_retired();
  main_parameters_.validate();
}

void Engine::flush_writes() {
  const auto lock = this->lock();
  main_parameters_.refuse_torn();
  guarded([&] { main_parameters_.flush_writes(); });
}

void Engine::prepare_load() {
  const auto lock = this->lock();
  guarded([&] { main_parameters_.flush_writes(); });
}

void Engine::set_torn(std::set<std::string> names) {
  const auto lock = this->lock();
  main_parameters_.set_torn(std::move(names));
}

void Engine::set_reader(std::future<void> read) {
  const auto lock = this->lock();
  main_parameters_.set_reader(std::move(read));
}

std::vector<at::Tensor> Engine::gather_main(Unit& unit, std::span<const at::Tensor> main) {
  const auto lock = this->lock();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole;
  guarded([&] { whole = gatherer_.gather_main(unit, main); });
  return whole;
}

std::vector<at::Tensor> Engine::summon(Unit& unit) {
  const auto lock = this->lock();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole;
  guarded([&] { whole = main_parameters_.summon(unit); });
  return whole;
}

void Engine::dismiss(Unit& unit, std::span<const at::Tensor> whole) {
  const auto lock = this->lock();
  const at::NoGradGuard no_grad;
  guarded([&] {
    if (!main_parameters_.dismiss(unit, whole)) return;
    gatherer_.outdate_copies(unit);
    evict(unit);
  });
}

void Engine::main_shards_changed() {
  {
    const auto lock = this->lock();
    guarded([&] { main_parameters_.exchange_shards(); });
  }
  main_parameters_changed();
}

void Engine::main_parameters_changed() {
  const auto lock = this->lock();
  main_parameters_.changed();
  for (const auto& unit : units_) {
    set_use(*unit, UseState::kUnused);
    gatherer_.outdate_copies(*unit);
  }
  forget_moves();
  if (backward_ == BackwardState::kNone) {
    schedule_.begin(Phase::kForward);
    pools_.end_step();  // Where units stay gathered after backward, this is where a step ends.
  }
  const at::NoGradGuard no_grad;
  guarded([&] {
    for (const auto& unit : units_) gatherer_.start_shards(*unit);
  });
}
std::vector<at::Tensor> Engine::take_gradients(Unit& unit) {
  const auto lock = this->lock();
  return reducer_.take_main_gradient(unit);
}

std::vector<std::unique_ptr<Unit>> Engine::release() {
  const auto lock = this->lock();
  reset_locked();
  main_parameters_.retire();
  reducer_.forget_units();
  for (const auto& unit : units_) {
    if (!unit->replicated_parameters()) unit->free_whole();  // Slots that units have kept are this engine's.
    unit->called.clear();
  }
  return std::move(units_);
}

}  // namespace fsdp::engine
