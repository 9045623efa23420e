#include "optim/parameterwise.h"

#include <utility>

namespace fsdp::optim {
namespace {

/// The boundaries between what ranks update that fall inside of a parameter: the first, counted from the parameter's start, and their
/// distance. The first is not less than the parameter's size if there are none. Arithmetic on the layout alone: the same on every rank.
struct Cuts {
  std::int64_t first;
  std::int64_t distance;
};

Cuts cuts_of(const engine::Unit& unit, std::size_t parameter) {
  const auto& placement = unit.layout.placements()[parameter];
  const auto distance = unit.layout.sub_buffers()[placement.sub_buffer].shard_numel * unit.main_pieces().count;
  if (distance == 0) return {placement.numel, 0};  // the sub-buffer is empty
  return {distance - placement.offset % distance, distance};
}

}  // namespace

bool is_whole(const engine::Unit& unit, std::size_t parameter) {
  return cuts_of(unit, parameter).first >= unit.layout.placements()[parameter].numel;
}

bool is_cut_between_blocks(const engine::Unit& unit, std::size_t parameter, std::int64_t block) {
  if (is_whole(unit, parameter)) return true;
  const auto cuts = cuts_of(unit, parameter);
  const bool several = cuts.first + cuts.distance < unit.layout.placements()[parameter].numel;
  return cuts.first % block == 0 && (!several || cuts.distance % block == 0);
}

Parameterwise::Parameterwise(std::shared_ptr<engine::Engine> engine, Groups groups, const Selection& selection, MakeState make_state,
                             UpdatePiece update)
    : groups_(std::move(groups)), make_state_(std::move(make_state)), update_(std::move(update)), memory_(engine) {
  for (const auto& unit : engine->units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      if (!unit->parameters[i].trainable || unit->main_slice(i).numel == 0 || !selection(*unit, i)) continue;
      pieces_.push_back({.unit = unit.get(),
                         .parameter = i,
                         .group = groups_.index_of(unit->parameters[i].name),
                         .value = {},
                         .gradient = {},
                         .state = {}});
    }
  }
}

void Parameterwise::step(double lr_factor) {
  for (auto& piece : pieces_) {
    if (!piece.unit->main_gradient_valid || !piece.unit->parameters[piece.parameter].has_gradient) continue;
    if (piece.steps++ == 0) {
      // Not before: a view of gradients can be taken only while they have memory.
      const auto slice = piece.unit->main_slice(piece.parameter);
      piece.value = piece.unit->main[slice.sub_buffer].narrow(0, slice.offset, slice.numel);
      piece.gradient = piece.unit->main_gradient[slice.sub_buffer].narrow(0, slice.offset, slice.numel);
      piece.state = make_state_(piece, memory_);
    }
    const auto& group = groups_[piece.group];
    update_(group, group.lr * lr_factor, piece);
  }
}

}  // namespace fsdp::optim
