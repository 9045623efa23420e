#include "engine/gradient_accumulator.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string_view>
#include <utility>

#include "comm/parts.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

std::vector<std::size_t> trainable_sub_buffers(const Unit& unit) {
  std::vector<std::size_t> all(unit.layout.trainable_sub_buffers());
  std::iota(all.begin(), all.end(), std::size_t{0});
  return all;
}

/// Sets the views of a buffer that is laid out, and its padding.
void find_gradients(GradientBuffer& buffer, const Unit& unit) {
  const auto& layout = unit.layout;
  buffer.views.resize(unit.parameters.size());
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> used(buffer.parts.size());  // [begin, end) in elements
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    if (!unit.parameters[i].trainable) continue;
    const auto& position = layout.positions()[i];
    const auto& part = buffer.parts[position.sub_buffer];
    if (!part.defined()) continue;
    const auto itemsize = static_cast<std::int64_t>(part.itemsize());
    buffer.views[i] =
        view_of(buffer.storage, part.scalar_type(), (part.storage_offset() + position.offset) * itemsize, unit.parameters[i].shape);
    if (position.numel > 0) used[position.sub_buffer].emplace_back(position.offset, position.offset + position.numel);
  }
  for (std::size_t k = 0; k < buffer.parts.size(); ++k) {
    if (!buffer.parts[k].defined()) continue;
    std::sort(used[k].begin(), used[k].end());
    used[k].emplace_back(buffer.parts[k].numel(), 0);
    std::int64_t end = 0;
    for (const auto& [begin, next_end] : used[k]) {
      if (begin > end) buffer.padding.push_back(comm::flat_view(buffer.parts[k], end, begin - end));
      end = next_end;
    }
  }
}

/// The dtype in which [Sent as computed] keeps gradients of a sub-buffer.
at::ScalarType computed_dtype(const SubBufferFormat& format) {
  const bool narrows = format.wire_gradient == at::kFloat && (format.compute == at::kBFloat16 || format.compute == at::kHalf);
  return narrows ? format.compute : format.wire_gradient;
}

/// NCCL's own reduce-scatter in fp32, which switches of the network may add up, is kept by this variable of the environment.
bool is_wanted() {
  const char* const value = std::getenv("FSDP_SEND_AS_COMPUTED");
  return value == nullptr || std::string_view(value) != "0";
}

}  // namespace

GradientAccumulator::GradientAccumulator(Unit& unit_) : GradientAccumulator(unit_, trainable_sub_buffers(unit_)) {}

GradientAccumulator::GradientAccumulator(Unit& unit_, std::vector<std::size_t> sub_buffers_)
    : unit(unit_),
      sub_buffers(std::move(sub_buffers_)),
      is_part(sub_buffers.size() < unit.layout.trainable_sub_buffers()),
      parameters(unit.parameters.size()),
      valid(unit.main_gradient.valid) {
  const auto& layout = unit.layout;
  const auto& formats = unit.formats;
  const auto trainable = layout.trainable_sub_buffers();
  const auto is_own = [&](std::size_t k) { return std::find(sub_buffers.begin(), sub_buffers.end(), k) != sub_buffers.end(); };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!is_part || is_own(layout.positions()[i].sub_buffer)) held.push_back(i);
  }
  // A buffer has nothing of other sub-buffers.
  const auto lay_out = [&](Buffer& buffer, const std::function<Part(std::size_t)>& part_of) {
    engine::lay_out(buffer, memory::empty_storage(unit.whole.buffer.storage.device()), trainable,
                    [&](std::size_t k) { return is_own(k) ? part_of(k) : Part{}; });
  };
  const auto lay_out_gradients = [&](GradientBuffer& buffer, const std::function<Part(std::size_t)>& part_of) {
    lay_out(buffer, part_of);
    find_gradients(buffer, unit);
  };
  const auto numel = [&](std::size_t k, std::int64_t pieces) { return layout.sub_buffers()[k].shard_numel * pieces; };
  const auto inner = unit.inner_pieces().count;
  const auto world = layout.world_size();
  const auto differs = [&](std::size_t k) { return formats[k].wire_gradient != formats[k].main_gradient; };

  lay_out_gradients(wire, [&](std::size_t k) { return Part{formats[k].wire_gradient, numel(k, world)}; });
  if (std::any_of(sub_buffers.begin(), sub_buffers.end(), differs)) {
    own_local = std::make_unique<GradientBuffer>();
    lay_out_gradients(*own_local, [&](std::size_t k) { return Part{formats[k].main_gradient, numel(k, world)}; });
  }
  if (unit.offloaded()) {
    lay_out(reduced_buffer, [&](std::size_t k) { return Part{formats[k].main_gradient, unit.main_gradient.buffer.parts[k].numel()}; });
    reduced = reduced_buffer.parts;
  } else {
    reduced = unit.main_gradient.parts;
  }
  const auto device = unit.whole.buffer.storage.device();
  const auto& format = unit.options.grad_comm_format;
  if (format && format->stochastic_rounding && !device.is_cpu()) {
    reductions_on_device = at::zeros({}, at::TensorOptions(at::kLong).device(device));
  }
  const auto& reduce = *unit.communicators.reduce;
  const auto staged_by = [&](const comm::Communicator& ranks, std::int64_t shard_numel, at::ScalarType dtype) {
    const comm::Traffic traffic = ranks.traffic();
    if (!format || traffic.contributions() == 0) return Part{dtype, ranks.staging_numel(shard_numel, dtype)};
    return Part{at::kByte, traffic.staging_bytes(shard_numel, *format, dtype)};
  };
  const auto staged = [&](std::size_t k, at::ScalarType dtype) { return staged_by(reduce, numel(k, inner), dtype); };
  lay_out(staging, [&](std::size_t k) { return staged(k, formats[k].wire_gradient); });
  const auto narrows = [&](std::size_t k) { return computed_dtype(formats[k]) != formats[k].wire_gradient; };
  agrees_on_dtype = !reduce.is_alone() && std::any_of(sub_buffers.begin(), sub_buffers.end(), narrows);
  if (agrees_on_dtype && is_wanted()) {
    computed = std::make_unique<GradientBuffer>();
    lay_out_gradients(*computed, [&](std::size_t k) { return Part{computed_dtype(formats[k]), numel(k, world)}; });
    lay_out(computed_staging, [&](std::size_t k) { return staged(k, computed_dtype(formats[k])); });
  }
  if (unit.communicators.outer) {
    const std::int64_t replicas = unit.communicators.outer->size();
    const auto share = [&](std::size_t k) { return (numel(k, inner) + replicas - 1) / replicas; };
    const auto shares = [&](std::size_t k) { return unit.outer_cuts() ? numel(k, inner) : share(k) * replicas; };
    lay_out(partial.buffer, [&](std::size_t k) { return Part{formats[k].main_gradient, shares(k)}; });
    lay_out(partial.wire, [&](std::size_t k) { return differs(k) ? Part{formats[k].wire_gradient, shares(k)} : Part{}; });
    lay_out(partial.staging, [&](std::size_t k) {
      return staged_by(*unit.communicators.outer, unit.outer_cuts() ? numel(k, 1) : share(k), formats[k].wire_gradient);
    });
  }
}

at::Tensor GradientAccumulator::partial_shards(std::size_t k) const {
  return comm::flat_view(partial.buffer.parts[k], 0, unit.layout.sub_buffers()[k].shard_numel * unit.inner_pieces().count);
}

at::Tensor GradientAccumulator::own_share(std::size_t k) const {
  const auto share = partial.buffer.parts[k].numel() / unit.communicators.outer->size();
  return comm::flat_view(partial.buffer.parts[k], unit.communicators.outer_rank() * share, share);
}

}  // namespace fsdp::engine
