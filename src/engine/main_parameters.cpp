#include "engine/main_parameters.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "memory/device_memory.h"

namespace fsdp::engine {

void MainParameters::check_parameters() {
  const auto lock = engine_.lock();
  refuse_retired();
  validate();
}

void MainParameters::flush_writes() {
  const auto lock = after_reader(engine_.lock_for_use());
  refuse_torn();
  engine_.guarded([&] { write_back_all(); });
}

void MainParameters::prepare_load() {
  const auto lock = after_reader(engine_.lock_for_use());
  engine_.guarded([&] { write_back_all(); });
}

void MainParameters::write_back_all() {
  refuse_retired();
  refuse_summoned("this handle or optimizer is used");
  validate();
  const auto& units = engine_.units_;
  for (const auto& unit : units) {
    engine_.gatherer_.stop_sending(*unit);
    engine_.gatherer_.write_back(*unit);
  }
  // The caller may write memory that is being copied to the device.
  if (std::any_of(units.begin(), units.end(), [](const auto& unit) { return unit->offloaded(); })) {
    memory::synchronize(engine_.options_.device());
  }
}

void MainParameters::set_reader(std::future<void> read, std::thread::id thread) {
  const auto lock = after_reader(engine_.lock());
  read_ = read.share();
  reader_thread_ = thread;
  reader_process_ = getpid();
}

std::unique_lock<std::mutex> MainParameters::after_reader(std::unique_lock<std::mutex> held) {
  while (read_.valid() && read_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (reader_thread_ == std::this_thread::get_id()) {
      throw Error(
          "main parameters are to be written by the thread that reads them (reading() of local_shards), which would wait for itself; end "
          "the reading first");
    }
    if (reader_process_ != getpid()) break;  // The parent's thread reads the parent's memory, and does not exist here.
    const auto read = read_;
    held.unlock();
    read.wait();
    held.lock();
  }
  read_ = {};
  return held;
}

void MainParameters::expose() {
  const auto lock = engine_.lock();
  exposed_ = true;
  note_change();
}

bool MainParameters::is_exposed() {
  const auto lock = engine_.lock();
  return exposed_;
}

void MainParameters::set_torn(std::set<std::string> names) {
  const auto lock = engine_.lock();
  refuse_retired();
  state_ = names.empty() ? MainState::kWhole : MainState::kTorn;
  if (names.empty()) torn_.clear();
  torn_.merge(std::move(names));
}

std::set<std::string> MainParameters::torn() {
  const auto lock = engine_.lock();
  return torn_;
}

bool MainParameters::may_be_lost() {
  const auto lock = engine_.lock();
  // Writes to parameters that are themselves the main parameters are not noticed.
  const bool sees_writes = std::none_of(engine_.units_.begin(), engine_.units_.end(), [](const auto& unit) {
    return !unit->parameters.empty() && unit->replicated_parameters() && !unit->has_separate_main();
  });
  return state_ == MainState::kTorn || (state_ == MainState::kInitial && sees_writes);
}

std::vector<at::Tensor> MainParameters::gather_main(Unit& unit, std::span<const at::Tensor> main) {
  const auto lock = engine_.lock_for_use();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole;
  engine_.guarded([&] { whole = engine_.gatherer_.gather_main(unit, main); });
  return whole;
}

std::vector<at::Tensor> MainParameters::summon(Unit& unit) {
  const auto lock = after_reader(engine_.lock_for_use());  // dismiss() writes, and no reading begins before it.
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole;
  engine_.guarded([&] {
    refuse_torn();
    validate();
    engine_.gatherer_.write_back(unit);
    whole = engine_.gatherer_.gather_main(unit, unit.main.parts);
    summoned_.insert(&unit);
  });
  return whole;
}

void MainParameters::dismiss(Unit& unit, std::span<const at::Tensor> whole) {
  const auto lock = engine_.lock();
  const at::NoGradGuard no_grad;
  summoned_.erase(&unit);
  if (whole.empty()) return;
  engine_.guarded([&] {
    note_change();
    engine_.gatherer_.stop_sending(unit);
    if (unit.offloaded()) memory::synchronize(engine_.options_.device());  // the main parameters may be on their way to the device
    for (std::size_t k = 0; k < whole.size(); ++k) unit.main.parts[k].copy_(region(whole[k], unit.all_pieces(), unit.main_pieces()));
    unit.whole.is_base = false;
    engine_.gatherer_.outdate_copies(unit);
    engine_.evict(unit);
  });
}

void MainParameters::wrote(Unit& unit) {
  const auto lock = after_reader(engine_.lock());  // The write-back may follow at any time.
  note_change();
  unit.whole.written = true;
}

void MainParameters::changed(bool forward_begins) {
  const auto lock = engine_.lock_for_use();
  engine_.outdate_all(/*starts_shards=*/!forward_begins);
}

void MainParameters::send_values() {
  const auto lock = engine_.lock_for_use();
  for (const auto& unit : engine_.units_) {
    engine_.guarded([&] { engine_.gatherer_.stop_sending(*unit); });  // It decodes what is under way as it was sent.
    unit->whole.is_base = false;
  }
}

void MainParameters::shards_changed() {
  send_values();
  const auto lock = after_reader(engine_.lock_for_use());
  engine_.guarded([&] {
    for (const auto& unit : engine_.units_) {
      if (unit->replicated_optimizer()) engine_.gatherer_.exchange_main(*unit);
    }
  });
  engine_.outdate_all(/*starts_shards=*/true);
}

void MainParameters::retire() {
  const auto lock = engine_.lock();
  state_ = MainState::kRetired;
}

bool MainParameters::is_retired() {
  const auto lock = engine_.lock();
  return state_ == MainState::kRetired;
}

void MainParameters::tell_update(std::uint64_t by, std::string settings) {
  const auto lock = engine_.lock();
  auto& facts = engine_.facts_;
  facts.updates_by[by] = std::move(settings);
  facts.updates.clear();
  for (const auto& [optimizer, said] : facts.updates_by) facts.updates += (facts.updates.empty() ? "" : ", ") + said;
}

void MainParameters::rejoin_streams() {
  const auto lock = engine_.lock();
  engine_.stream_.rejoin();
}

void MainParameters::exclusively(const std::function<void()>& work) {
  const auto lock = engine_.lock();
  engine_.guarded(work);
}

void MainParameters::set_export(std::function<std::string()> end) { engine_.end_export_ = std::move(end); }

void MainParameters::refuse_export() { const auto lock = engine_.lock_for_use(); }

void MainParameters::finish_gradient_sync() {
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

std::vector<at::Tensor> MainParameters::take_gradients(Unit& unit) {
  const auto lock = engine_.lock();
  return engine_.reducer_.take_main_gradient(unit);
}

bool MainParameters::has_left_gradients() {
  engine_.recover();
  const auto lock = engine_.lock();
  return engine_.reducer_.has_gradients();
}

void MainParameters::zero_grad() {
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

void MainParameters::note_change() {
  if (state_ == MainState::kInitial) state_ = MainState::kWhole;
}

void MainParameters::refuse_torn() const {
  if (state_ != MainState::kTorn) return;
  throw Error("a load of this model failed halfway, so that its values belong to no checkpoint; load again before it is used");
}

void MainParameters::refuse_retired() const {
  if (state_ != MainState::kRetired) return;
  throw Error(
      "this handle, optimizer or graph belongs to a model that fsdp::fully_unshard made ordinary again, or, in Python, whose parameters "
      "were converted (.to()), replaced or unfrozen since; call fully_shard and make a new one, or run forward again before backward");
}

void MainParameters::refuse_summoned(const char* what) const {
  for (const auto& unit : engine_.units_) {
    if (!is_summoned(*unit)) continue;
    throw Error(std::string(what) + " while SummonFullParams keeps unit '" + unit->name + "' whole; end the guard's scope first");
  }
}

void MainParameters::validate() const {
  for (const auto& unit : engine_.units_) {
    if (is_summoned(*unit)) continue;
    for (const auto& parameter : unit->parameters) {
      const auto tensor = parameter.tensor.lock();
      if (tensor && tensor->storage().unsafeGetStorageImpl() != unit->whole.buffer.storage.unsafeGetStorageImpl()) {
        throw Error("parameter '" + parameter.name + "' of unit '" + unit->name +
                    "' was given other memory after fully_shard, without an operator that could have been refused; do that before "
                    "fully_shard");
      }
    }
  }
}

}  // namespace fsdp::engine
