#include "engine/unit.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/pieces.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

constexpr const char* kSharded =
    "this parameter's memory is freed while its unit is sharded: use it in an operator, or call unshard() on its unit's handle first "
    "(torch::save reads memory without an operator)";

std::int64_t itemsize_of(at::ScalarType dtype) { return static_cast<std::int64_t>(c10::elementSize(dtype)); }

std::int64_t round_up(std::int64_t bytes) { return (bytes + layout::kAlignment - 1) / layout::kAlignment * layout::kAlignment; }

at::Tensor view_of(const c10::Storage& storage, at::ScalarType dtype, std::int64_t byte_offset, at::IntArrayRef shape) {
  const auto options = at::TensorOptions().dtype(dtype).device(storage.device());
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
  impl->set_sizes_contiguous(shape);
  impl->set_storage_offset(byte_offset / itemsize_of(dtype));
  return at::Tensor(std::move(impl));
}

/// What a buffer holds of a sub-buffer; without a dtype nothing (the buffer's part is then undefined).
struct Part {
  std::optional<at::ScalarType> dtype;
  std::int64_t numel = 0;
};

/// Lays parts one behind the other, each on a multiple of kAlignment bytes. `part_of(k)` is sub-buffer k's.
template <typename PartOf>
void lay_out(Buffer& buffer, c10::Storage storage, std::size_t sub_buffers, const PartOf& part_of) {
  buffer.storage = std::move(storage);
  for (std::size_t k = 0; k < sub_buffers; ++k) {
    const Part part = part_of(k);
    buffer.parts.push_back(part.dtype ? view_of(buffer.storage, *part.dtype, buffer.bytes, {part.numel}) : at::Tensor());
    if (part.dtype) buffer.bytes += round_up(part.numel * itemsize_of(*part.dtype));
  }
}

template <typename PartOf>
void lay_out_gradients(GradientBuffer& buffer, const Unit& unit, const PartOf& part_of) {
  const auto& layout = unit.layout;
  lay_out(buffer, memory::empty_storage(unit.full.storage.device()), layout.trainable_sub_buffers(), part_of);
  buffer.views.resize(unit.parameters.size());
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> used(buffer.parts.size());  // [begin, end) in elements
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    if (!unit.parameters[i].trainable) continue;
    const auto& placement = layout.placements()[i];
    const auto& part = buffer.parts[placement.sub_buffer];
    buffer.views[i] = view_of(buffer.storage, part.scalar_type(),
                              (part.storage_offset() + placement.offset) * itemsize_of(part.scalar_type()), unit.parameters[i].shape);
    if (placement.numel > 0) used[placement.sub_buffer].emplace_back(placement.offset, placement.offset + placement.numel);
  }
  for (std::size_t k = 0; k < buffer.parts.size(); ++k) {
    std::sort(used[k].begin(), used[k].end());
    used[k].emplace_back(buffer.parts[k].numel(), 0);
    std::int64_t end = 0;
    for (const auto& [begin, next_end] : used[k]) {
      if (begin > end) buffer.padding.push_back(comm::flat_view(buffer.parts[k], end, begin - end));
      end = next_end;
    }
  }
}

}  // namespace

void Buffer::acquire(memory::SlotPool& pool, memory::Kind kind) {
  if (bytes == 0 || live()) return;
  slot = pool.acquire(bytes, kind);
  memory::attach(*storage.unsafeGetStorageImpl(), slot);
}

void Buffer::release() {
  if (!live()) return;
  memory::detach(*storage.unsafeGetStorageImpl());
  slot.release();
}

Unit::Unit(std::string name_, std::vector<UnitParameter> parameters_, layout::UnitLayout layout_, std::vector<SubBufferFormat> formats_,
           UnitOptions options_, UnitGroups groups_, c10::Storage storage)
    : name(std::move(name_)),
      parameters(std::move(parameters_)),
      layout(std::move(layout_)),
      formats(std::move(formats_)),
      options(options_),
      groups(std::move(groups_)) {
  const at::NoGradGuard no_grad;
  const auto device = storage.device();
  const auto all = layout.sub_buffers().size();
  const auto trainable = layout.trainable_sub_buffers();
  const auto numel = [&](std::size_t k, std::int64_t pieces) { return layout.sub_buffers()[k].shard_numel * pieces; };
  const auto empty = [&] { return memory::empty_storage(device); };
  const auto inner = inner_pieces().count;
  const auto world = layout.world_size();

  lay_out(full, std::move(storage), all, [&](std::size_t k) { return Part{formats[k].compute, numel(k, world)}; });
  free_whole();
  lay_out(wire, empty(), all, [&](std::size_t k) { return formats[k].gather ? Part{at::kByte, travelling_numel(k) * world} : Part{}; });
  if (groups.post_forward) {
    const auto kept = world / groups.post_forward->size();
    lay_out(post_forward, empty(), all, [&](std::size_t k) { return Part{formats[k].compute, numel(k, kept)}; });
  }
  if (options.outer_sharded_optimizer) {
    lay_out(shards, empty(), all, [&](std::size_t k) {
      return Part{formats[k].gather ? at::kByte : formats[k].compute, travelling_numel(k) * inner};
    });
  }
  const auto empty_main = [&] { return memory::empty_storage(offloaded() ? c10::Device(at::kCPU) : device); };
  lay_out(main_buffer, empty_main(), all, [&](std::size_t k) {
    return main_is_shared(k) ? Part{} : Part{formats[k].main, numel(k, main_pieces().count)};
  });
  for (std::size_t k = 0; k < all; ++k) {
    if (!main_is_shared(k)) {
      main.push_back(main_buffer.parts[k]);
    } else if (replicated_parameters()) {
      main.push_back(region(full.parts[k], all_pieces(), main_pieces()));
    } else {
      main.push_back(region(shards.parts[k], inner_pieces(), main_pieces()));
    }
  }

  const auto held = replicated_gradients() ? all_pieces() : main_pieces();
  const auto held_gradients = [&](std::size_t k) { return Part{formats[k].main_gradient, numel(k, held.count)}; };
  lay_out(main_gradient_buffer, empty_main(), trainable, held_gradients);
  for (const auto& part : main_gradient_buffer.parts) main_gradient.push_back(region(part, held, main_pieces()));
  if (offloaded()) {
    lay_out(reduced_buffer, empty(), trainable, held_gradients);
    reduced = reduced_buffer.parts;
  } else {
    reduced = main_gradient;
  }
  lay_out_gradients(wire_gradients, *this, [&](std::size_t k) { return Part{formats[k].wire_gradient, numel(k, world)}; });
  const auto differs = [](const SubBufferFormat& format) { return format.wire_gradient != format.main_gradient; };
  if (std::any_of(formats.begin(), formats.begin() + static_cast<std::ptrdiff_t>(trainable), differs)) {
    own_local_gradients = std::make_unique<GradientBuffer>();
    lay_out_gradients(*own_local_gradients, *this, [&](std::size_t k) { return Part{formats[k].main_gradient, numel(k, world)}; });
  }
  // Receive staging of a reduction that gives so many pieces.
  const auto staged = [&](std::size_t k, const comm::Communicator& communicator, std::int64_t pieces) {
    return Part{formats[k].wire_gradient, communicator.staging_numel(numel(k, pieces), formats[k].wire_gradient)};
  };
  lay_out(staging, empty(), trainable, [&](std::size_t k) { return staged(k, *groups.reduce, inner); });
  if (groups.outer) {
    lay_out(partial, empty(), trainable, [&](std::size_t k) { return Part{formats[k].main_gradient, numel(k, inner)}; });
    lay_out(partial_wire, empty(), trainable, [&](std::size_t k) {
      return differs(formats[k]) ? Part{formats[k].wire_gradient, numel(k, inner)} : Part{};
    });
    lay_out(outer_staging, empty(), trainable, [&](std::size_t k) { return staged(k, *groups.outer, 1); });
  }
}

std::int64_t Unit::travelling_numel(std::size_t k) const {
  const auto& format = formats[k].gather;
  const auto numel = layout.sub_buffers()[k].shard_numel;
  return format ? numel / format->block * format->block_bytes : numel;
}

bool Unit::has_separate_main() const {
  return offloaded() || std::any_of(formats.begin(), formats.end(), [](const SubBufferFormat& format) { return !format.gathers_main(); });
}

Unit::Pieces Unit::main_pieces() const {
  if (options.outer_sharded_optimizer) return own_pieces();
  return replicated_optimizer() ? all_pieces() : inner_pieces();
}

at::Tensor Unit::region(const at::Tensor& tensor, Pieces held, Pieces pieces) {
  const std::int64_t piece = tensor.numel() / held.count;
  return comm::flat_view(tensor, (pieces.first - held.first) * piece, pieces.count * piece);
}

void Unit::free_whole() {
  auto& impl = *full.storage.unsafeGetStorageImpl();
  // A profiler that records inputs asks for their addresses, too, before the operator has gathered them; it may have null. So may who asks
  // for the address of parameters without elements, which no gather changes.
  if (at::hasCallbacks() || full.bytes == 0) {
    memory::detach(impl);
  } else {
    memory::detach(impl, kSharded);
  }
  full.slot.release();
}

at::Tensor Unit::whole(std::span<const at::Tensor> sub_buffers, std::size_t parameter) const {
  const auto& placement = layout.placements()[parameter];
  return sub_buffers[placement.sub_buffer].narrow(0, placement.offset, placement.numel).view(parameters[parameter].shape);
}

Unit::MainSlice Unit::slice(std::size_t parameter, Pieces pieces) const {
  const auto sub_buffer = layout.placements()[parameter].sub_buffer;
  const auto local = layout.local_slice(parameter, pieces.first, pieces.count);
  const std::int64_t base = (pieces.first - main_pieces().first) * layout.sub_buffers()[sub_buffer].shard_numel;
  return {sub_buffer, local.numel == 0 ? 0 : base + local.shard_offset, local.numel, local.parameter_offset};
}

double Unit::gradient_scale() const {
  return 1.0 / (options.gradient_divide_factor == 0 ? static_cast<double>(layout.world_size()) : options.gradient_divide_factor);
}

void Unit::allocate_main(memory::Accounting& accounting) {
  const auto device = full.storage.device();
  const auto allocate = [&](Buffer& buffer, at::Tensor& memory, memory::Kind kind) {
    memory = kind == memory::Kind::kHost ? memory::host_zeros(device, buffer.bytes) : memory::zeros(device, buffer.bytes);
    memory::attach(*buffer.storage.unsafeGetStorageImpl(), memory.data_ptr(), buffer.bytes);
    accounting.add(kind, buffer.bytes);
  };
  allocate(main_buffer, main_memory, offloaded() ? memory::Kind::kHost : memory::Kind::kMainParameters);
  if (options.outer_sharded_optimizer) {
    allocate(shards, shards_memory, memory::Kind::kGatheredParameters);
    shards_outdated = true;
  }
  if (replicated_parameters()) {
    allocate(full, replica_memory, memory::Kind::kGatheredParameters);
    // What every rank fills for itself is there at once; copies in another dtype are made at the first use.
    state = has_separate_main() ? ParameterState::kSharded : ParameterState::kPresent;
  }
}

bool encloses(const Unit& outer, const Unit& inner) {
  for (const Unit* unit = &inner; unit != nullptr; unit = unit->parent) {
    if (unit == &outer) return true;
  }
  return false;
}

bool related(const Unit& a, const Unit& b) { return encloses(a, b) || encloses(b, a); }

}  // namespace fsdp::engine
