#include "engine/unit.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

constexpr const char* kSharded =
    "this parameter's memory is freed while its unit is sharded: use it in an operator, or call unshard() on its unit's handle first "
    "(torch::save reads memory without an operator)";

at::Tensor view_of(const c10::Storage& storage, at::ScalarType dtype, std::int64_t byte_offset, at::IntArrayRef shape) {
  const auto options = at::TensorOptions().dtype(dtype).device(storage.device());
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
  impl->set_sizes_contiguous(shape);
  impl->set_storage_offset(byte_offset / static_cast<std::int64_t>(c10::elementSize(dtype)));
  return at::Tensor(std::move(impl));
}

}  // namespace

Unit::Unit(std::string name_, std::vector<UnitParameter> parameters_, layout::UnitLayout layout_, UnitOptions options_,
           std::shared_ptr<comm::Communicator> communicator_, c10::Storage storage_)
    : name(std::move(name_)),
      parameters(std::move(parameters_)),
      layout(std::move(layout_)),
      options(options_),
      communicator(std::move(communicator_)),
      storage(std::move(storage_)),
      main_gradient_storage(memory::empty_storage(storage.device())),
      gradient_storage(memory::empty_storage(storage.device())),
      staging_storage(memory::empty_storage(storage.device())) {
  free_whole();
  std::int64_t staging_offset = 0;
  for (std::size_t k = 0; k < layout.sub_buffers().size(); ++k) {
    const auto& part = layout.sub_buffers()[k];
    const auto dtype = static_cast<at::ScalarType>(part.dtype);
    const std::int64_t numel = part.shard_numel * layout.world_size();
    full.push_back(view_of(storage, dtype, part.byte_offset, {numel}));
    if (k >= layout.trainable_sub_buffers()) continue;
    unreduced.push_back(view_of(gradient_storage, dtype, part.byte_offset, {numel}));
    if (replicated_gradients()) {
      const std::int64_t own = replicated_optimizer() ? 0 : communicator->rank() * part.shard_numel;
      main_gradient.push_back(view_of(main_gradient_storage, dtype, part.byte_offset + own * part.itemsize,
                                      {replicated_optimizer() ? numel : part.shard_numel}));
    } else {
      main_gradient.push_back(view_of(main_gradient_storage, dtype, part.shard_byte_offset, {part.shard_numel}));
    }
    const std::int64_t staging_numel = communicator->staging_numel(part.shard_numel);
    staging.push_back(view_of(staging_storage, dtype, staging_offset, {staging_numel}));
    const std::int64_t bytes = staging_numel * part.itemsize;
    staging_offset += (bytes + layout::kAlignment - 1) / layout::kAlignment * layout::kAlignment;
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].trainable) continue;
    const auto& placement = layout.placements()[i];
    const auto& part = layout.sub_buffers()[placement.sub_buffer];
    parameters[i].gradient_view =
        view_of(gradient_storage, parameters[i].dtype, part.byte_offset + placement.offset * part.itemsize, parameters[i].shape);
  }
  collect_padding();
}

void Unit::collect_padding() {
  for (std::size_t k = 0; k < layout.trainable_sub_buffers(); ++k) {
    const auto& part = layout.sub_buffers()[k];
    std::vector<std::pair<std::int64_t, std::int64_t>> used;  // [begin, end) in elements
    for (const auto& placement : layout.placements()) {
      if (placement.sub_buffer == k && placement.numel > 0) used.emplace_back(placement.offset, placement.offset + placement.numel);
    }
    std::sort(used.begin(), used.end());
    used.emplace_back(part.shard_numel * layout.world_size(), 0);
    std::int64_t end = 0;
    for (const auto& [begin, next_end] : used) {
      if (begin > end) {
        padding.push_back(
            view_of(gradient_storage, static_cast<at::ScalarType>(part.dtype), part.byte_offset + end * part.itemsize, {begin - end}));
      }
      end = next_end;
    }
  }
}

void Unit::free_whole() {
  auto& impl = *storage.unsafeGetStorageImpl();
  // A profiler that records inputs asks for their addresses, too, before the operator has gathered them; it may have null.
  if (at::hasCallbacks()) {
    memory::detach(impl);
  } else {
    memory::detach(impl, kSharded);
  }
  slot.release();
}

at::Tensor Unit::whole(std::size_t parameter) const {
  const auto& placement = layout.placements()[parameter];
  return full[placement.sub_buffer].narrow(0, placement.offset, placement.numel).view(parameters[parameter].shape);
}

at::Tensor Unit::own_region(const at::Tensor& whole, std::size_t sub_buffer) const {
  const std::int64_t shard = layout.sub_buffers()[sub_buffer].shard_numel;
  return whole.narrow(0, communicator->rank() * shard, shard);
}

Unit::MainSlice Unit::main_slice(std::size_t parameter) const {
  if (!replicated_optimizer()) return owned_slice(parameter);
  const auto& placement = layout.placements()[parameter];
  return {placement.sub_buffer, placement.offset, placement.numel, 0};
}

Unit::MainSlice Unit::owned_slice(std::size_t parameter) const {
  const auto sub_buffer = layout.placements()[parameter].sub_buffer;
  const auto slice = layout.local_slice(parameter, communicator->rank());
  const std::int64_t base = replicated_optimizer() ? communicator->rank() * layout.sub_buffers()[sub_buffer].shard_numel : 0;
  return {sub_buffer, base + slice.shard_offset, slice.numel, slice.parameter_offset};
}

bool encloses(const Unit& outer, const Unit& inner) {
  for (const Unit* unit = &inner; unit != nullptr; unit = unit->parent) {
    if (unit == &outer) return true;
  }
  return false;
}

bool related(const Unit& a, const Unit& b) { return encloses(a, b) || encloses(b, a); }

}  // namespace fsdp::engine
