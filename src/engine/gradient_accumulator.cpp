#include "engine/gradient_accumulator.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "comm/parts.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

void lay_out_gradients(GradientBuffer& buffer, const Unit& unit, const std::function<Part(std::size_t)>& part_of) {
  const auto& layout = unit.layout;
  lay_out(buffer, memory::empty_storage(unit.whole.buffer.storage.device()), layout.trainable_sub_buffers(), part_of);
  buffer.views.resize(unit.parameters.size());
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> used(buffer.parts.size());  // [begin, end) in elements
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    if (!unit.parameters[i].trainable) continue;
    const auto& position = layout.positions()[i];
    const auto& part = buffer.parts[position.sub_buffer];
    const auto itemsize = static_cast<std::int64_t>(part.itemsize());
    buffer.views[i] =
        view_of(buffer.storage, part.scalar_type(), (part.storage_offset() + position.offset) * itemsize, unit.parameters[i].shape);
    if (position.numel > 0) used[position.sub_buffer].emplace_back(position.offset, position.offset + position.numel);
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

GradientAccumulator::GradientAccumulator(Unit& unit_) : unit(unit_), parameters(unit.parameters.size()) {
  const auto& layout = unit.layout;
  const auto& formats = unit.formats;
  const auto trainable = layout.trainable_sub_buffers();
  const auto numel = [&](std::size_t k, std::int64_t pieces) { return layout.sub_buffers()[k].shard_numel * pieces; };
  const auto empty = [&] { return memory::empty_storage(unit.whole.buffer.storage.device()); };
  const auto inner = unit.inner_pieces().count;
  const auto world = layout.world_size();
  const auto differs = [](const SubBufferFormat& format) { return format.wire_gradient != format.main_gradient; };

  lay_out_gradients(wire, unit, [&](std::size_t k) { return Part{formats[k].wire_gradient, numel(k, world)}; });
  if (std::any_of(formats.begin(), formats.begin() + static_cast<std::ptrdiff_t>(trainable), differs)) {
    own_local = std::make_unique<GradientBuffer>();
    lay_out_gradients(*own_local, unit, [&](std::size_t k) { return Part{formats[k].main_gradient, numel(k, world)}; });
  }
  if (unit.offloaded()) {
    lay_out(reduced_buffer, empty(), trainable, [&](std::size_t k) {
      return Part{formats[k].main_gradient, unit.main_gradient.buffer.parts[k].numel()};
    });
    reduced = reduced_buffer.parts;
  } else {
    reduced = unit.main_gradient.parts;
  }
  // Returns the size of the receive staging of a reduction whose result has this many pieces.
  const auto staged = [&](std::size_t k, const comm::Communicator& communicator, std::int64_t pieces) {
    return Part{formats[k].wire_gradient, communicator.staging_numel(numel(k, pieces), formats[k].wire_gradient)};
  };
  lay_out(staging, empty(), trainable, [&](std::size_t k) { return staged(k, *unit.communicators.reduce, inner); });
  if (unit.communicators.outer) {
    const std::int64_t replicas = unit.communicators.outer->size();
    const auto share = [&](std::size_t k) { return (numel(k, inner) + replicas - 1) / replicas; };
    const auto shares = [&](std::size_t k) { return unit.outer_cuts() ? numel(k, inner) : share(k) * replicas; };
    lay_out(partial.buffer, empty(), trainable, [&](std::size_t k) { return Part{formats[k].main_gradient, shares(k)}; });
    lay_out(partial.wire, empty(), trainable, [&](std::size_t k) {
      return differs(formats[k]) ? Part{formats[k].wire_gradient, shares(k)} : Part{};
    });
    lay_out(partial.staging, empty(), trainable, [&](std::size_t k) {
      const auto wire_dtype = formats[k].wire_gradient;
      return Part{wire_dtype, unit.communicators.outer->staging_numel(unit.outer_cuts() ? numel(k, 1) : share(k), wire_dtype)};
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
