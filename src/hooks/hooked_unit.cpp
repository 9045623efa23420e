#include "hooks/hooked_unit.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"

namespace fsdp::hooks {
namespace {

engine::SubBufferFormat format_of(const ParameterSpec& parameter, const UnitSpec& spec) {
  const auto own = parameter.dtype;
  engine::SubBufferFormat format{.compute = own, .main = own, .main_gradient = own, .wire_gradient = own};
  if (!c10::isFloatingType(own)) return format;
  format.compute = spec.param_dtype.value_or(own);
  format.wire_gradient = spec.reduce_dtype.value_or(format.compute);
  return format;
}

/// With the dimension that is cut first.
std::vector<std::int64_t> rows_first(const ParameterSpec& parameter) {
  auto shape = parameter.shape;
  std::rotate(shape.begin(), shape.begin() + parameter.shard_dim, shape.begin() + parameter.shard_dim + 1);
  return shape;
}

layout::UnitLayout layout_of(const UnitSpec& spec, std::int64_t ranks) {
  std::vector<layout::ParameterSpec> parameters;
  for (const auto& parameter : spec.parameters) {
    if (parameter.shape.empty()) throw Error("parameter '" + parameter.name + "' is a scalar, which has no rows to shard");
    parameters.push_back({.name = parameter.name,
                          .shape = rows_first(parameter),
                          .dtype = static_cast<std::int32_t>(parameters.size()),  // a sub-buffer of its own
                          .itemsize = static_cast<std::int64_t>(c10::elementSize(parameter.dtype)),
                          .trainable = parameter.trainable,
                          .granularity = Granularity::rows()});
  }
  return {std::move(parameters), ranks};
}

std::int64_t inner_size(const DeviceMesh& mesh) { return mesh.dims().back().size; }

/// The mesh has an outer dimension of more than one rank.
bool has_outer(const DeviceMesh& mesh) { return mesh.dims().size() == 2 && mesh.dims().front().size > 1; }

engine::UnitCommunicators communicators_of(const UnitSpec& spec) {
  const auto& mesh = spec.mesh;
  const auto& inner = mesh.dims().back().name;
  engine::UnitCommunicators communicators;
  communicators.gather = mesh.communicator(inner);
  communicators.reduce = spec.separate_reduce_group ? mesh.new_communicator(inner) : communicators.gather;
  if (has_outer(mesh)) communicators.outer = mesh.communicator(mesh.dims().front().name);
  if (spec.reshard_after_forward_size != 0) {
    communicators.post_forward = mesh.new_communicator(inner, spec.reshard_after_forward_size);
  }
  return communicators;
}

}  // namespace

HookedUnit::HookedUnit(UnitSpec spec) : spec_(std::move(spec)) {
  auto layout = layout_of(spec_, inner_size(spec_.mesh));
  std::vector<engine::SubBufferFormat> formats;
  for (const auto& part : layout.sub_buffers()) {
    formats.push_back(format_of(spec_.parameters[static_cast<std::size_t>(part.dtype)], spec_));
  }
  std::vector<engine::UnitParameter> parameters;
  for (const auto& parameter : spec_.parameters) {
    engine::UnitParameter entry;
    entry.name = parameter.name;
    entry.position = parameters.size();
    entry.shape = rows_first(parameter);
    entry.global_shape = entry.shape;
    entry.global_offset.assign(entry.shape.size(), 0);
    entry.dtype = parameter.dtype;
    entry.trainable = parameter.trainable;
    parameters.push_back(std::move(entry));
  }
  owned_ = std::make_unique<engine::Unit>(spec_.name, std::move(parameters), std::move(layout), std::move(formats), spec_.options,
                                          communicators_of(spec_), memory::empty_storage(spec_.mesh.device()));
  unit_ = owned_.get();
}

std::vector<std::int64_t> HookedUnit::shard_shape(std::size_t i) const {
  auto shape = spec_.parameters[i].shape;
  auto& rows = shape[static_cast<std::size_t>(spec_.parameters[i].shard_dim)];
  const auto pieces = unit_->main_pieces();
  const auto ranks = unit_->layout.world_size();
  const auto per_rank = (rows + ranks - 1) / ranks;
  const auto row_at = [&](std::int64_t piece) { return std::min(rows, piece * per_rank); };
  rows = row_at(pieces.first + pieces.count) - row_at(pieces.first);
  return shape;
}

void HookedUnit::allocate() {
  const auto device = spec_.mesh.device();
  unit_->main_memory =
      unit_->offloaded() ? memory::host_zeros(device, unit_->main_buffer.bytes) : memory::zeros(device, unit_->main_buffer.bytes);
  if (unit_->replicated_parameters()) unit_->replica_memory = memory::zeros(device, unit_->full.bytes);
  shards_.clear();
  for (std::size_t i = 0; i < spec_.parameters.size(); ++i) shards_.push_back(make_shard(i));
}

/// A tensor of parameter i's form: `rows` of it along the dimension that is cut lie one behind the other from `byte_offset` on.
at::Tensor HookedUnit::shaped(const c10::Storage& storage, std::int64_t byte_offset, at::ScalarType dtype, std::size_t i) const {
  const auto& parameter = spec_.parameters[i];
  const auto shape = storage.unsafeGetStorageImpl() == unit_->full.storage.unsafeGetStorageImpl() ? parameter.shape : shard_shape(i);
  const auto cut = static_cast<std::size_t>(parameter.shard_dim);
  // In memory, the dimension that is cut is the outermost.
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    if (d == cut) continue;
    strides[d] = stride;
    stride *= std::max<std::int64_t>(shape[d], 1);
  }
  strides[cut] = stride;
  const auto meta = c10::scalarTypeToTypeMeta(dtype);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::computeDispatchKey(dtype, at::kStrided, storage.device())), meta);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape, strides);
  tensor.unsafeGetTensorImpl()->set_storage_offset(byte_offset / static_cast<std::int64_t>(meta.itemsize()));
  return tensor;
}

const at::Tensor& HookedUnit::shard(std::size_t i) const {
  if (!allocated()) throw Error("internal: unit '" + spec_.name + "' has no memory yet");
  return shards_[i];
}

at::Tensor HookedUnit::make_shard(std::size_t i) const {
  const auto slice = unit_->main_slice(i);
  const auto& main = unit_->main[slice.sub_buffer];
  const bool in_replica = main.storage().unsafeGetStorageImpl() == unit_->full.storage.unsafeGetStorageImpl();
  const auto& memory = in_replica ? unit_->replica_memory : unit_->main_memory;
  const auto itemsize = static_cast<std::int64_t>(main.itemsize());
  return shaped(memory.storage(), memory.storage_offset() + (main.storage_offset() + slice.offset) * itemsize, main.scalar_type(), i);
}

at::Tensor HookedUnit::whole(std::size_t i) const {
  const auto& placement = unit_->layout.placements()[i];
  const auto& part = unit_->full.parts[placement.sub_buffer];
  return shaped(unit_->full.storage, (part.storage_offset() + placement.offset) * static_cast<std::int64_t>(part.itemsize()),
                part.scalar_type(), i);
}

void HookedUnit::set_leaf(std::size_t i, const at::Tensor& leaf) {
  unit_->parameters[i].tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(leaf.getIntrusivePtr());
}

at::Tensor HookedUnit::gradient_shard(const std::vector<at::Tensor>& gradients, std::size_t i) const {
  const auto slice = unit_->main_slice(i);
  const auto& part = gradients[slice.sub_buffer];
  const auto itemsize = static_cast<std::int64_t>(part.itemsize());
  return shaped(part.storage(), (part.storage_offset() + slice.offset) * itemsize, part.scalar_type(), i);
}

std::unique_ptr<engine::Unit> HookedUnit::release() {
  if (!owned_) throw Error("unit '" + spec_.name + "' belongs to a model already");
  return std::move(owned_);
}

}  // namespace fsdp::hooks
