// Where reductions put their results: see reducer.h. The reductions are in reducer.cpp.

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

#include "engine/reducer.h"
#include "engine/tensor_bytes.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

memory::Kind main_gradients_kind(const Unit& unit) { return unit.offloaded() ? memory::Kind::kHost : memory::Kind::kMainGradients; }

}  // namespace

// From torch's allocator, not from a slot: gradients lie where activations were, and the next activations after them: they never add up.
void Reducer::allocate_main_gradient(Unit& unit) {
  if (unit.main_gradient.memory) return;
  RECORD_USER_SCOPE(memory::allocation_range(main_gradients_kind(unit)));
  auto& buffer = unit.main_gradient.buffer;
  if (unit.offloaded() && !device_.is_cpu()) {
    auto& host = unit.main_gradient.host_memory;
    if (host.use_count() != 1) {  // There is none yet, or a program still holds gradients in it.
      host = std::make_shared<c10::DataPtr>(memory::allocate_host(device_, buffer.bytes, unit.options.host_memory));
    }
    unit.main_gradient.memory = host;
  } else {
    const c10::DeviceGuard guard(device_);
    unit.main_gradient.memory =
        std::make_shared<c10::DataPtr>(c10::GetAllocator(device_.type())->allocate(static_cast<std::size_t>(buffer.bytes)));
  }
  memory::attach(*buffer.storage.unsafeGetStorageImpl(), unit.main_gradient.memory->get(), buffer.bytes);
  accounting_.add(main_gradients_kind(unit), buffer.bytes);
}

/// Memory for the result of a reduction. What is offloaded comes back first, to be added to as everywhere else: adding up on the host would
/// round twice.
void Reducer::allocate_reduced(GradientAccumulator& gradients) {
  Unit& unit = gradients.unit;
  if (!unit.offloaded()) return allocate_main_gradient(unit);
  gradients.reduced_buffer.acquire(pool_, memory::Kind::kCommunication);
  if (!gradients.valid) return;
  for (const auto k : gradients.sub_buffers) {
    gradients.reduced[k].copy_(unit.main_gradient.parts[k], /*non_blocking=*/true);
  }
}

/// The result of a whole reduction reaches the main gradients.
void Reducer::deliver(GradientAccumulator& gradients) {
  Unit& unit = gradients.unit;
  if (unit.offloaded()) {
    allocate_main_gradient(unit);
    for (const auto k : gradients.sub_buffers) {
      unit.main_gradient.parts[k].copy_(gradients.reduced[k], /*non_blocking=*/true);
      copies_to_host_ = true;
    }
    gradients.reduced_buffer.release();
  }
  gradients.valid = true;
  if (std::exchange(unit.main_gradient.valid, true)) return;
  // Parts that no rank has a gradient of are zero.
  for (auto* other : by_unit_[unit.place.index]) {
    if (other->valid || under_way(*other)) continue;
    for (const auto k : other->sub_buffers) zero_bytes(unit.main_gradient.buffer.parts[k]);
  }
}

bool Reducer::has_gradients() const {
  return std::any_of(gradients_.begin(), gradients_.end(), [](const auto& gradients) {
    return gradients->unit.main_gradient.valid || gradients->partial.is_held || gradients->state != GradientState::kNone;
  });
}

void Reducer::zero_grad() {
  for (const auto& gradients : gradients_) {
    Unit& unit = gradients->unit;
    gradients->partial.is_held = false;
    gradients->partial.buffer.release();
    for (auto& parameter : gradients->parameters) parameter.partial = false;
    gradients->adds_up = false;
    release_main_gradient(unit);
  }
}

/// The unit has no main gradients any more. Their memory goes with its last owner.
void Reducer::release_main_gradient(Unit& unit) {
  unit.main_gradient.valid = false;
  for (auto* gradients : by_unit_[unit.place.index]) gradients->valid = false;
  for (auto& parameter : unit.parameters) parameter.has_gradient = false;
  if (!unit.main_gradient.memory) return;
  memory::detach(*unit.main_gradient.buffer.storage.unsafeGetStorageImpl());
  unit.main_gradient.memory.reset();
  accounting_.remove(main_gradients_kind(unit), unit.main_gradient.buffer.bytes);
}

std::vector<at::Tensor> Reducer::take_main_gradient(Unit& unit) {
  std::vector<at::Tensor> taken;
  if (!unit.main_gradient.valid) return taken;
  auto* const memory = unit.main_gradient.memory->get();
  const auto device = unit.main_gradient.buffer.storage.device();
  c10::DataPtr owned(
      memory, new std::shared_ptr<c10::DataPtr>(unit.main_gradient.memory),
      [](void* owner) { delete static_cast<std::shared_ptr<c10::DataPtr>*>(owner); }, device);
  const auto bytes = static_cast<std::size_t>(unit.main_gradient.buffer.bytes);
  const c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(owned), nullptr,
                                                                   /*resizable=*/false));
  for (const auto& part : unit.main_gradient.parts) {
    const auto offset = part.storage_offset() * static_cast<std::int64_t>(part.itemsize());
    taken.push_back(view_of(storage, part.scalar_type(), offset, part.sizes()));
  }
  release_main_gradient(unit);
  return taken;
}

}  // namespace fsdp::engine
