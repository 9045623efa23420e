#include "engine/main_parameters.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "fsdp/error.h"
#include "memory/device_memory.h"

namespace fsdp::engine {

void MainParameters::set_torn(std::set<std::string> names) {
  refuse_retired();
  state_ = names.empty() ? MainState::kWhole : MainState::kTorn;
  if (names.empty()) torn_.clear();
  torn_.merge(std::move(names));
}

void MainParameters::changed() {
  if (state_ == MainState::kInitial) state_ = MainState::kWhole;
}

bool MainParameters::may_be_lost() const {
  // Writes to parameters that are themselves the main parameters are not noticed.
  const bool sees_writes = std::none_of(units_.begin(), units_.end(),
                                        [](const auto& unit) { return unit->replicated_parameters() && !unit->has_separate_main(); });
  return state_ == MainState::kTorn || (state_ == MainState::kInitial && sees_writes);
}

void MainParameters::expose() {
  exposed_ = true;
  changed();
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
  for (const auto& unit : units_) {
    if (!is_summoned(*unit)) continue;
    throw Error(std::string(what) + " while SummonFullParams keeps unit '" + unit->name + "' whole; end the guard's scope first");
  }
}

void MainParameters::validate() const {
  for (const auto& unit : units_) {
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

void MainParameters::set_reader(std::future<void> read, std::thread::id thread) {
  reader_ = read.share();
  reader_thread_ = thread;
  reader_process_ = getpid();
}

std::shared_future<void> MainParameters::reader() {
  if (!reader_.valid()) return {};
  if (reader_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
    reader_ = {};
  } else if (reader_thread_ == std::this_thread::get_id()) {
    throw Error(
        "main parameters are to be written by the thread that reads them (reading() of local_shards), which would wait for itself; end the "
        "reading first");
  } else if (reader_process_ != getpid()) {
    reader_ = {};  // The parent's thread reads the parent's memory, and does not exist here.
  }
  return reader_;
}

void MainParameters::flush_writes() {
  refuse_retired();
  refuse_summoned("this handle or optimizer is used");
  validate();
  for (const auto& unit : units_) {
    gatherer_.stop_sending(*unit);
    gatherer_.write_back(*unit);
  }
  // The caller may write memory that is being copied to the device.
  if (std::any_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->offloaded(); })) memory::synchronize(device_);
}

std::vector<at::Tensor> MainParameters::summon(Unit& unit) {
  refuse_torn();
  validate();
  gatherer_.write_back(unit);
  auto whole = gatherer_.gather_main(unit, unit.main.parts);
  summoned_.insert(&unit);
  return whole;
}

bool MainParameters::dismiss(Unit& unit, std::span<const at::Tensor> whole) {
  summoned_.erase(&unit);
  if (whole.empty()) return false;
  changed();
  gatherer_.stop_sending(unit);
  if (unit.offloaded()) memory::synchronize(device_);  // the main parameters may be on their way to the device
  for (std::size_t k = 0; k < whole.size(); ++k) unit.main.parts[k].copy_(region(whole[k], unit.all_pieces(), unit.main_pieces()));
  return true;
}

void MainParameters::exchange_shards() {
  for (const auto& unit : units_) {
    if (unit->replicated_optimizer()) gatherer_.exchange_main(*unit);
  }
}

}  // namespace fsdp::engine
