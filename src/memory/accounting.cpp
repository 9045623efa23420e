#include "memory/accounting.h"

#include <algorithm>

namespace fsdp::memory {
namespace {

void grow(MemoryUse& use, std::int64_t bytes) {
  use.live += bytes;
  use.peak = std::max(use.peak, use.live);
}

}  // namespace

const char* allocation_range(Kind kind) {
  switch (kind) {
    case Kind::kMainParameters:
      return "libfsdp::main_parameters";
    case Kind::kMainGradients:
      return "libfsdp::main_gradients";
    case Kind::kGatheredParameters:
      return "libfsdp::gathered_parameters";
    case Kind::kUnreducedGradients:
      return "libfsdp::unreduced_gradients";
    case Kind::kCommunication:
      return "libfsdp::communication";
    case Kind::kOptimizerState:
      return "libfsdp::optimizer_state";
    case Kind::kHost:
      return "libfsdp::host";
  }
  return "";
}

void Accounting::add(Kind kind, std::int64_t bytes) {
  const auto place = static_cast<std::size_t>(kind);
  grow(by_kind_[place], bytes);
  peaks_of_step_[place] = std::max(peaks_of_step_[place], by_kind_[place].live);
  if (kind == Kind::kHost) return;
  grow(total_, bytes);
  peak_of_step_ = std::max(peak_of_step_, total_.live);
  if (grew_) grew_();
}

void Accounting::begin_step() {
  peak_of_step_ = total_.live;
  for (std::size_t place = 0; place < by_kind_.size(); ++place) peaks_of_step_[place] = by_kind_[place].live;
}

void Accounting::lend(Kind kind, std::int64_t bytes) {
  lent_ += bytes;
  add(kind, bytes);
}

void Accounting::take_back(Kind kind, std::int64_t bytes) {
  remove(kind, bytes);
  lent_ -= bytes;
}

void Accounting::remove(Kind kind, std::int64_t bytes) {
  by_kind_[static_cast<std::size_t>(kind)].live -= bytes;
  if (kind != Kind::kHost) total_.live -= bytes;
}

void Accounting::pool_grew(std::int64_t bytes, bool shared) {
  grow(pool_, bytes);
  if (shared) grow(shared_, bytes);
  ++pool_allocations_;
}

void Accounting::pool_shrank(std::int64_t bytes, bool shared) {
  pool_.live -= bytes;
  if (shared) shared_.live -= bytes;
}

MemoryStats Accounting::stats() const {
  const auto of = [&](Kind kind) { return by_kind_[static_cast<std::size_t>(kind)]; };
  return {
      .main_parameters = of(Kind::kMainParameters),
      .main_gradients = of(Kind::kMainGradients),
      .gathered_parameters = of(Kind::kGatheredParameters),
      .unreduced_gradients = of(Kind::kUnreducedGradients),
      .communication = of(Kind::kCommunication),
      .optimizer_state = of(Kind::kOptimizerState),
      .total = total_,
      .host = of(Kind::kHost),
      .slots = pool_,
      .shared_slots = shared_,
      .slot_allocations = pool_allocations_,
  };
}

void Accounting::reset_peaks() {
  for (auto& use : by_kind_) use.peak = use.live;
  total_.peak = total_.live;
  pool_.peak = pool_.live;
  shared_.peak = shared_.live;
}

}  // namespace fsdp::memory
