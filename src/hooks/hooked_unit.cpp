#include "hooks/hooked_unit.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "comm/mesh/ranks.h"
#include "engine/buffer.h"
#include "fsdp/error.h"
#include "hooks/hooked_model.h"
#include "memory/accounting.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"

namespace fsdp::hooks {
namespace {

/// Returns the parameter as the engine has it. The engine reduces real numbers, so a complex parameter becomes a real one with the two
/// parts in an additional last dimension.
ParameterSpec in_real_numbers(ParameterSpec parameter) {
  if (!c10::isComplexType(parameter.dtype)) return parameter;
  parameter.dtype = c10::toRealValueType(parameter.dtype);
  parameter.shape.push_back(2);
  parameter.param_dtype = parameter.grad_dtype = parameter.dtype;
  return parameter;
}

/// Returns the dtype that users see of a parameter which the engine has in dtype `stored`.
at::ScalarType seen_dtype(const ParameterSpec& parameter, at::ScalarType stored) {
  return c10::isComplexType(parameter.dtype) ? c10::toComplexType(stored) : stored;
}

/// Returns the shape of a parameter in memory and on the wire, where one rank's slices come one behind the other, and then the next rank's.
/// If the first dimension is cut, the slices are the rows; otherwise the shape has an additional dimension for the ranks.
std::vector<std::int64_t> stored_shape(const ParameterSpec& parameter, std::int64_t ranks) {
  auto shape = parameter.shape;
  if (parameter.shard_dim == 0) return shape;
  auto& cut = shape[static_cast<std::size_t>(parameter.shard_dim)];
  if (cut % ranks != 0) {
    throw Error("parameter '" + parameter.name + "': " + std::to_string(cut) + " slices along dimension " +
                std::to_string(parameter.shard_dim) + " do not divide by " + std::to_string(ranks) + " ranks");
  }
  cut /= ranks;
  shape.insert(shape.begin(), ranks);
  return shape;
}

/// Puts the ranks' slices along a dimension that is not the first into their places, so that unsharded parameters are contiguous.
std::shared_ptr<const GatherFormat> interleaved(const ParameterSpec& parameter, at::ScalarType compute) {
  auto format = std::make_shared<GatherFormat>();
  format->block_bytes = static_cast<std::int64_t>(c10::elementSize(compute));
  format->pre_all_gather = [compute](const at::Tensor& main, const at::Tensor& wire) { wire.view(compute).copy_(main); };
  format->post_all_gather = [compute, cut = parameter.shard_dim, shape = parameter.shape](const at::Tensor& wire, const at::Tensor& whole) {
    const auto ranks = wire.size(0);
    auto slices = shape;
    slices[static_cast<std::size_t>(cut)] /= ranks;
    auto sizes = slices;
    sizes.insert(sizes.begin(), ranks);
    // [ranks, ..., slices, ...] to [..., ranks, slices, ...].
    whole.view(shape).unflatten(cut, {ranks, -1}).copy_(wire.view(compute).view(sizes).movedim(0, cut));
  };
  return format;
}

/// A format without bytes, for parameters that the extension sends and keeps.
std::shared_ptr<const GatherFormat> nothing() {
  auto format = std::make_shared<GatherFormat>();
  format->pre_all_gather = format->post_all_gather = [](const at::Tensor&, const at::Tensor&) {};
  return format;
}

engine::SubBufferFormat format_of(const ParameterSpec& given, const UnitSpec& spec) {
  const auto parameter = in_real_numbers(given);
  const auto own = parameter.dtype;
  engine::SubBufferFormat format{.compute = own, .main = own, .main_gradient = own, .wire_gradient = own};
  if (c10::isFloatingType(given.dtype)) {
    format.compute = parameter.param_dtype.value_or(spec.param_dtype.value_or(own));
    format.wire_gradient = spec.reduce_dtype.value_or(parameter.grad_dtype.value_or(format.compute));
    format.main_gradient = parameter.grad_dtype.value_or(own);
    format.rounds_sums = spec.rounds_gradients;
  }
  format.gather = parameter.gather_format;
  format.extended = parameter.extended;
  // Otherwise the unit would have main parameters of its own for it, in the shards that the outer ranks cut, or in the unsharded
  // parameters.
  const bool shares_main = spec.options.outer_sharded_optimizer || spec.options.placements.parameters == Placement::kReplicated;
  if (parameter.extended && shares_main) format.gather = nothing();
  if (parameter.shard_dim != 0) format.gather = interleaved(parameter, format.compute);
  return format;
}

/// The parameters as the engine has them. `ranks` is the number of ranks over which the inner dimension cuts.
std::vector<engine::UnitParameter> stored_parameters(const UnitSpec& spec, std::int64_t ranks) {
  std::vector<engine::UnitParameter> parameters;
  for (const auto& given : spec.parameters) {
    const auto parameter = in_real_numbers(given);
    if (given.shape.empty()) throw Error("parameter '" + parameter.name + "' is a scalar, which has no rows to shard");
    auto& entry = parameters.emplace_back();
    entry.name = parameter.name;
    entry.position = parameters.size() - 1;
    entry.shape = entry.global_shape = stored_shape(parameter, ranks);
    entry.global_offset.assign(entry.shape.size(), 0);
    entry.dtype = parameter.dtype;
    entry.trainable = parameter.trainable;
  }
  return parameters;
}

/// `pieces` is the number over which both dimensions cut.
layout::UnitLayout layout_of(const std::vector<engine::UnitParameter>& parameters, std::int64_t pieces) {
  std::vector<layout::ParameterTraits> traits;
  for (const auto& parameter : parameters) {
    traits.push_back({.name = parameter.name,
                      .shape = parameter.shape,
                      .dtype = static_cast<std::int32_t>(parameter.position),  // a sub-buffer of its own
                      .itemsize = static_cast<std::int64_t>(c10::elementSize(parameter.dtype)),
                      .trainable = parameter.trainable,
                      .granularity = Granularity::rows()});
  }
  return {std::move(traits), pieces};
}

/// Returns the address of a tensor's memory; null for an undefined tensor.
const void* memory_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.unsafeGetTensorImpl()->unsafe_storage().data() : nullptr;
}

std::int64_t inner_size(const DeviceMesh& mesh) { return mesh.dims().back().size; }

/// The mesh has an outer dimension of more than one rank.
bool has_outer(const DeviceMesh& mesh) { return mesh.dims().size() == 2 && mesh.dims().front().size > 1; }

engine::UnitCommunicators communicators_of(const UnitSpec& spec) {
  return engine::communicators_of(spec.mesh, spec.separate_reduce_group, spec.post_forward_size);
}

}  // namespace

HookedUnit::HookedUnit(UnitSpec spec) : spec_(std::move(spec)) {
  const auto ranks = inner_size(spec_.mesh);
  if (ranks == 1) {  // All rows lie on this rank, along whatever dimension they are cut.
    for (auto& parameter : spec_.parameters) parameter.shard_dim = 0;
  }
  if (spec_.options.outer_sharded_optimizer && !has_outer(spec_.mesh)) spec_.options.outer_sharded_optimizer = false;
  auto parameters = stored_parameters(spec_, ranks);
  auto layout = layout_of(parameters, spec_.options.outer_sharded_optimizer ? ranks * spec_.mesh.dims().front().size : ranks);
  std::vector<engine::SubBufferFormat> formats;
  for (const auto& part : layout.sub_buffers()) {
    formats.push_back(format_of(spec_.parameters[static_cast<std::size_t>(part.dtype)], spec_));
  }
  engine::check_formats(spec_.name, formats, spec_.options.placements);
  engine::check_grad_comm(spec_.options.grad_comm_format, parameters, layout, formats);
  owned_ = std::make_unique<engine::Unit>(spec_.name, std::move(parameters), std::move(layout), std::move(formats), spec_.options,
                                          communicators_of(spec_), memory::empty_storage(spec_.mesh.device()));
  unit_ = owned_.get();
}

at::Tensor HookedUnit::as_stored(std::size_t i, const at::Tensor& whole) const {
  const auto cut = spec_.parameters[i].shard_dim;
  const auto real = whole.is_complex() ? at::view_as_real(whole.resolve_conj()) : whole;
  if (cut == 0) return real;
  return real.unflatten(cut, {inner_size(spec_.mesh), -1}).movedim(cut, 0);
}

void HookedUnit::rename(std::string name, std::vector<std::string> parameters) {
  spec_.name = name;
  for (std::size_t i = 0; i < parameters.size(); ++i) spec_.parameters[i].name = parameters[i];
  unit_->rename(std::move(name), std::move(parameters));
}

void HookedUnit::set_mesh(const DeviceMesh& mesh) {
  spec_.mesh = mesh;
  unit_->communicators = communicators_of(spec_);
}

void HookedUnit::set_separate_reduce_group(bool separate) {
  if (separate == spec_.separate_reduce_group) return;
  // Making a group is collective, so ranks on which this was not called would be waited for. Therefore the ranks compare first.
  const std::string text = std::string("separate_reduce_scatter_group ") + (separate ? "true" : "false");
  comm::Ranks(spec_.mesh).compare(text, {.operation = "comparison of options", .unit = text});
  spec_.separate_reduce_group = separate;
  unit_->communicators.reduce = communicators_of(spec_).reduce;
}

void HookedUnit::drop_post_forward_mesh() {
  spec_.post_forward_size = 0;
  unit_->communicators.post_forward = nullptr;
}

void HookedUnit::set_fixed_addresses(bool fixed) {
  if (const auto model = this->model()) return model->engine()->set_fixed_addresses(*unit_, fixed);
  unit_->options.fixed_addresses = fixed;
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
  RECORD_USER_SCOPE(memory::allocation_range(unit_->offloaded() ? memory::Kind::kHost : memory::Kind::kMainParameters));
  unit_->main.memory = unit_->offloaded() ? memory::host_zeros(device, unit_->main.buffer.bytes, spec_.options.host_memory)
                                          : memory::zeros(device, unit_->main.buffer.bytes);
  if (unit_->replicated_parameters()) unit_->whole.memory = memory::zeros(device, unit_->whole.buffer.bytes);
  if (unit_->options.outer_sharded_optimizer) unit_->shards.memory = memory::zeros(device, unit_->shards.buffer.bytes);
  shards_.clear();
  homes_.clear();
  for (std::size_t i = 0; i < spec_.parameters.size(); ++i) {
    shards_.push_back(make_shard(i));
    homes_.push_back(memory_of(shards_.back()));
  }
  seen_ = homes_;
}

bool HookedUnit::take_exchanged_memory() {
  bool exchanged = false;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const auto* const memory = memory_of(shards_[i]);
    exchanged = std::exchange(seen_[i], memory) != memory || exchanged;
    if (memory == homes_[i]) continue;
    const at::NoGradGuard no_grad;
    make_shard(i).copy_(shards_[i]);
  }
  return exchanged;
}

void HookedUnit::tie(std::size_t i, const at::Tensor& shard) {
  if (spec_.parameters[i].extended) return;  // The extension takes the rows from the front end's shard.
  shards_.at(i) = shard.defined() ? shard : make_shard(i);
}

/// A contiguous tensor over a part of `memory`, which lives as long as it.
at::Tensor HookedUnit::view_of(const at::Tensor& memory, std::int64_t byte_offset, at::ScalarType dtype,
                               const std::vector<std::int64_t>& shape) {
  auto* const bytes = static_cast<char*>(memory.mutable_data_ptr()) + byte_offset;
  const auto size = static_cast<std::size_t>(c10::multiply_integers(shape)) * c10::elementSize(dtype);
  c10::DataPtr owned(
      bytes, new at::Tensor(memory), [](void* held) { delete static_cast<at::Tensor*>(held); }, memory.device());
  // As tensor_over(), in half of the instructions: each step makes one for each parameter.
  const c10::Storage storage(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size, std::move(owned), nullptr, /*resizable=*/false));
  return engine::view_of(storage, dtype, 0, shape);
}

const at::Tensor& HookedUnit::shard(std::size_t i) const {
  if (!allocated()) throw Error("internal: unit '" + spec_.name + "' has no memory yet");
  return shards_[i];
}

at::Tensor HookedUnit::make_shard(std::size_t i) const {
  if (spec_.parameters[i].extended) return {};
  const auto slice = unit_->main_slice(i);
  const auto& main = unit_->main.parts[slice.sub_buffer];
  const auto lies_in = [&](const engine::Buffer& buffer) {
    return main.storage().unsafeGetStorageImpl() == buffer.storage.unsafeGetStorageImpl();
  };
  const bool in_shards = unit_->options.outer_sharded_optimizer && lies_in(unit_->shards.buffer);
  const auto& memory = lies_in(unit_->whole.buffer) ? unit_->whole.memory : in_shards ? unit_->shards.memory : unit_->main.memory;
  const auto itemsize = static_cast<std::int64_t>(main.itemsize());
  return view_of(memory, (main.storage_offset() + slice.offset) * itemsize, seen_dtype(spec_.parameters[i], main.scalar_type()),
                 shard_shape(i));
}

at::Tensor HookedUnit::whole(std::size_t i) const {
  const auto& position = unit_->layout.positions()[i];
  const auto& part = unit_->whole.buffer.parts[position.sub_buffer];
  const auto offset = (part.storage_offset() + position.offset) * static_cast<std::int64_t>(part.itemsize());
  return engine::view_of(unit_->whole.buffer.storage, seen_dtype(spec_.parameters[i], part.scalar_type()), offset,
                         spec_.parameters[i].shape);
}

at::Tensor HookedUnit::post_forward_shard(std::size_t i, const std::vector<std::int64_t>& shape) const {
  const auto& part = unit_->whole.post_forward.parts.at(unit_->layout.positions()[i].sub_buffer);
  return engine::view_of(unit_->whole.post_forward.storage, seen_dtype(spec_.parameters[i], part.scalar_type()),
                         part.storage_offset() * static_cast<std::int64_t>(part.itemsize()), shape);
}

void HookedUnit::set_leaf(std::size_t i, const at::Tensor& leaf) {
  unit_->parameters[i].tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(leaf.getIntrusivePtr());
}

at::Tensor HookedUnit::gradient_shard(const std::vector<at::Tensor>& gradients, std::size_t i) const {
  const auto slice = unit_->main_slice(i);
  const auto& part = gradients[slice.sub_buffer];
  return view_of(part, slice.offset * static_cast<std::int64_t>(part.itemsize()), seen_dtype(spec_.parameters[i], part.scalar_type()),
                 shard_shape(i));
}

at::Tensor HookedUnit::watch_writes(std::size_t i) {
  const c10::InferenceMode no_inference(false);  // Inference tensors have no version.
  auto watched = engine::view_of(unit_->whole.buffer.storage, at::kByte, 0, {0});
  set_leaf(i, watched);
  return watched;
}

void HookedUnit::gather_now(const std::vector<std::pair<at::Tensor, at::Tensor>>& given, bool outer) const {
  std::vector<comm::GatherPart> parts;
  for (const auto& [whole, part] : given) parts.push_back({.full = whole, .shard = part});
  const auto& ranks = outer ? unit_->communicators.outer : unit_->communicators.gather;
  ranks->all_gather(parts, unit_->label(outer ? "outer all-gather of the extension" : "all-gather of the extension"))->wait();
}

std::shared_ptr<HookedModel> HookedUnit::require_model() const {
  auto model = this->model();
  if (!model) throw Error("internal: unit '" + spec_.name + "' belongs to no model");
  return model;
}

std::unique_ptr<engine::Unit> HookedUnit::release(std::weak_ptr<HookedModel> to) {
  if (!owned_) throw Error("unit '" + spec_.name + "' belongs to a model already");
  model_ = std::move(to);
  return std::move(owned_);
}

void HookedUnit::take_back(std::unique_ptr<engine::Unit> unit) {
  model_.reset();
  owned_ = std::move(unit);
}

}  // namespace fsdp::hooks
