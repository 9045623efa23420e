#include "engine/reducer.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "fsdp/error.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

/// [Two live gradients] So many units' buffers are alive at most, beside those of the units around them; so many reductions are under way
/// at most, each with its staging.
constexpr std::size_t kLiveGradients = 2;

void zero_bytes(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    std::memset(tensor.data_ptr(), 0, tensor.nbytes());
  } else {
    tensor.zero_();
  }
}

/// What a backward without synchronization left waits for this backward's share.
bool reduced_on_departure(const Unit& unit) { return unit.collected_in_this_backward && !unit.late; }

void append_bit(std::vector<std::uint8_t>& bits, std::size_t& count, bool value) {
  if (count % 8 == 0) bits.push_back(0);
  if (value) bits.back() |= static_cast<std::uint8_t>(1U << (count % 8));
  ++count;
}

}  // namespace

void Reducer::collect(Unit& unit, std::size_t parameter, const at::Tensor& gradient) {
  auto& target = unit.parameters[parameter];
  if (gradient.is_sparse()) {
    throw Error("parameter '" + target.name + "' of unit '" + unit.name +
                "' got a sparse gradient; flat shards are dense: build its embedding with sparse(false)");
  }
  if (unit.gradient_state == GradientState::kReducing) {
    // The buffer is on its way; a second reduction follows (see Unit::late).
    while (unit.gradient_state == GradientState::kReducing) finish_oldest();
  }
  if (unit.gradient_state == GradientState::kNone) {
    unit.late = unit.late || unit.reduced_in_this_backward;
    acquire(unit);
  }
  if (target.gradient_seen) {
    target.gradient_view.add_(gradient);
  } else {
    target.gradient_view.copy_(gradient);
  }
  target.gradient_seen = true;
  target.contributed = true;
  unit.collected_in_this_backward = true;
}

void Reducer::depart_to(const Unit& destination) {
  for (std::size_t i = 0; i < collecting_.size();) {
    Unit& unit = *collecting_[i];
    if (!reduced_on_departure(unit) || related(unit, destination)) {
      ++i;
    } else {
      reduce(unit);  // removes it from collecting_
    }
  }
}

void Reducer::acquire(Unit& unit) {
  unit.collects_in_place = unit.replicated_gradients() && !unit.main_gradient_valid;
  if (unit.collects_in_place) {
    // Nothing to add to: gradients are collected, and later reduced, in their final place.
    allocate_main_gradient(unit);
    memory::attach(*unit.gradient_storage.unsafeGetStorageImpl(), unit.main_gradient_memory->get(), unit.main_gradient_bytes());
  } else {
    // A unit whose gradients came without a touch (nothing needs the weights of a first layer) was not departed for: the one before it may
    // still collect.
    const auto collecting = std::count_if(collecting_.begin(), collecting_.end(),
                                          [&](const Unit* other) { return reduced_on_departure(*other) && !related(*other, unit); });
    while (!reducing_.empty() && reducing_.size() + static_cast<std::size_t>(collecting) >= kLiveGradients) finish_oldest();
    unit.gradient_slot = pool_.acquire(unit.layout.trainable_bytes(), memory::Kind::kUnreducedGradients);
    memory::attach(*unit.gradient_storage.unsafeGetStorageImpl(), unit.gradient_slot);
  }
  // Padding reaches gradient norms and optimizer segments: it must be zero, not what the slot held before.
  for (const auto& stretch : unit.padding) zero_bytes(stretch);
  unit.gradient_state = GradientState::kCollecting;
  collecting_.push_back(&unit);
}

// From torch's allocator, not from a slot: the gradients then lie in memory that activations have left, and the next activations get it
// back, so that the two never add up.
void Reducer::allocate_main_gradient(Unit& unit) {
  if (unit.main_gradient_memory) return;
  const auto device = unit.storage.device();
  const auto bytes = unit.main_gradient_bytes();
  const c10::DeviceGuard guard(device);
  unit.main_gradient_memory = std::make_shared<c10::DataPtr>(c10::GetAllocator(device.type())->allocate(static_cast<std::size_t>(bytes)));
  memory::attach(*unit.main_gradient_storage.unsafeGetStorageImpl(), unit.main_gradient_memory->get(), bytes);
  accounting_.add(memory::Kind::kMainGradients, bytes);
}

void Reducer::zero_grad(Unit& unit) {
  unit.main_gradient_valid = false;
  for (auto& parameter : unit.parameters) parameter.has_gradient = false;
  // Gradients that are collected in place and not yet reduced are not main gradients.
  if (!unit.main_gradient_memory || unit.collects_in_place) return;
  memory::detach(*unit.main_gradient_storage.unsafeGetStorageImpl());
  unit.main_gradient_memory.reset();
  accounting_.remove(memory::Kind::kMainGradients, unit.main_gradient_bytes());
}

void Reducer::reduce(Unit& unit) {
  for (auto& parameter : unit.parameters) {
    if (parameter.trainable && !parameter.gradient_seen) zero_bytes(parameter.gradient_view);
    parameter.gradient_seen = false;
  }
  while (reducing_.size() >= kLiveGradients) finish_oldest();  // for gradients that are collected in place, nothing has waited yet
  allocate_main_gradient(unit);
  std::int64_t staging_bytes = 0;
  if (!unit.staging.empty()) {
    const auto& last = unit.staging.back();
    staging_bytes = last.storage_offset() * static_cast<std::int64_t>(last.element_size()) + static_cast<std::int64_t>(last.nbytes());
  }
  if (staging_bytes > 0) {
    unit.staging_slot = pool_.acquire(staging_bytes, memory::Kind::kCommunication);
    memory::attach(*unit.staging_storage.unsafeGetStorageImpl(), unit.staging_slot);
  }
  std::vector<comm::ReducePiece> pieces;
  for (std::size_t k = 0; k < unit.unreduced.size(); ++k) {
    const auto& main = unit.main_gradient[k];
    pieces.push_back({.unreduced = unit.unreduced[k],
                      .staging = unit.staging[k],
                      .out = unit.replicated_optimizer() ? unit.own_region(main, k) : main,
                      .accumulate = unit.main_gradient_valid});
  }
  unit.reduction =
      unit.communicator->reduce_scatter(pieces, 1.0 / unit.communicator->size(), {.operation = "reduce-scatter", .unit = unit.name});
  unit.gradient_state = GradientState::kReducing;
  unit.reduced_in_this_backward = true;
  collecting_.erase(std::find(collecting_.begin(), collecting_.end(), &unit));
  reducing_.push_back(&unit);
}

void Reducer::finish_oldest() {
  Unit& unit = *reducing_.front();
  unit.reduction->wait();
  reducing_.pop_front();
  unit.main_gradient_valid = true;
  release(unit);
  if (unit.replicated_optimizer() && std::find(to_gather_.begin(), to_gather_.end(), &unit) == to_gather_.end()) {
    to_gather_.push_back(&unit);
  }
}

// Not before everything is reduced: a unit may be reduced twice (see Unit::late), into what would then be on its way, and when a reduction
// is waited for depends on the gradients that this rank happened to get, which the order of collectives must not.
void Reducer::gather_replicas() {
  std::vector<std::unique_ptr<comm::Pending>> gathers;
  for (Unit* unit : to_gather_) {
    std::vector<comm::GatherPiece> pieces;
    for (std::size_t k = 0; k < unit->main_gradient.size(); ++k) {
      pieces.push_back({.full = unit->main_gradient[k], .shard = unit->own_region(unit->main_gradient[k], k)});
    }
    gathers.push_back(unit->communicator->all_gather(pieces, {.operation = "all-gather of gradients", .unit = unit->name}));
  }
  to_gather_.clear();
  for (const auto& gather : gathers) gather->wait();
}

void Reducer::release(Unit& unit) {
  unit.reduction.reset();
  memory::detach(*unit.gradient_storage.unsafeGetStorageImpl());
  memory::detach(*unit.staging_storage.unsafeGetStorageImpl());
  unit.gradient_slot.release();
  unit.staging_slot.release();
  unit.collects_in_place = false;
  unit.gradient_state = GradientState::kNone;
}

void Reducer::finish(std::span<const std::unique_ptr<Unit>> units) {
  if (units.empty()) return;
  // Bits: for each unit, has it unreduced gradients, and are they late; for each trainable parameter, had this rank a gradient.
  std::vector<std::uint8_t> mine;
  std::size_t count = 0;
  for (const auto& unit : units) {
    append_bit(mine, count, unit->gradient_state == GradientState::kCollecting);
    append_bit(mine, count, unit->late);
    for (const auto& parameter : unit->parameters) append_bit(mine, count, parameter.contributed);
  }
  const auto own = at::from_blob(mine.data(), {static_cast<std::int64_t>(mine.size())}, at::kByte);
  const auto all = units.front()->communicator->exchange(own, {.operation = "gradient usage", .unit = units.front()->name});
  const auto* bytes = all.const_data_ptr<std::uint8_t>();
  std::vector<std::uint8_t> any(mine.size(), 0);
  for (std::int64_t rank = 0; rank < all.size(0); ++rank) {
    for (std::size_t i = 0; i < any.size(); ++i) any[i] |= bytes[static_cast<std::size_t>(rank) * any.size() + i];
  }
  std::size_t position = 0;
  const auto next_bit = [&] {
    const bool bit = ((any[position / 8] >> (position % 8)) & 1U) != 0;
    ++position;
    return bit;
  };
  for (const auto& unit : units) {
    const bool to_reduce = next_bit();
    unit->late = next_bit();
    for (auto& parameter : unit->parameters) {
      parameter.has_gradient = next_bit() || parameter.has_gradient;
      parameter.contributed = false;
    }
    if (!to_reduce) continue;
    while (unit->gradient_state == GradientState::kReducing) finish_oldest();
    if (unit->gradient_state == GradientState::kNone) acquire(*unit);
    reduce(*unit);
  }
  while (!reducing_.empty()) finish_oldest();
  gather_replicas();
  for (const auto& unit : units) unit->reduced_in_this_backward = false;
}

void Reducer::drop(std::span<const std::unique_ptr<Unit>> units) {
  to_gather_.clear();
  reducing_.clear();
  collecting_.clear();
  for (const auto& unit : units) {
    release(*unit);
    unit->reduced_in_this_backward = false;
    for (auto& parameter : unit->parameters) {
      parameter.gradient_seen = false;
      parameter.contributed = false;
    }
  }
}

}  // namespace fsdp::engine
