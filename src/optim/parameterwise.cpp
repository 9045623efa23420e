#include "optim/parameterwise.h"

#include <algorithm>
#include <utility>

namespace fsdp::optim {
namespace {

/// The boundaries between ranks that fall inside of a parameter: the first one, counted from the parameter's start, and their distance. If
/// there are none, the first is at least the size of the parameter. Arithmetic on the layout alone: the same on every rank.
struct Cuts {
  std::int64_t first;
  std::int64_t distance;
};

Cuts cuts_of(const engine::Unit& unit, std::size_t parameter) {
  const auto& position = unit.layout.positions()[parameter];
  const auto distance = unit.layout.sub_buffers()[position.sub_buffer].shard_numel * unit.main_pieces().count;
  if (distance == 0) return {position.numel, 0};  // the sub-buffer is empty
  return {distance - position.offset % distance, distance};
}

}  // namespace

bool is_whole(const engine::Unit& unit, std::size_t parameter) {
  return cuts_of(unit, parameter).first >= unit.layout.positions()[parameter].numel;
}

bool is_cut_between_blocks(const engine::Unit& unit, std::size_t parameter, std::int64_t block) {
  if (is_whole(unit, parameter)) return true;
  const auto cuts = cuts_of(unit, parameter);
  const bool several = cuts.first + cuts.distance < unit.layout.positions()[parameter].numel;
  return cuts.first % block == 0 && (!several || cuts.distance % block == 0);
}

Parameterwise::Parameterwise(std::shared_ptr<engine::Engine> engine, Groups groups, Selection selection, std::vector<StateKind> kinds,
                             MakeState make_state, UpdatePiece update)
    : BuiltInAlgorithm(std::move(engine), std::move(groups), std::move(kinds)),
      selection_(std::move(selection)),
      make_state_(std::move(make_state)),
      update_(std::move(update)),
      memory_(engine_) {
  groups_.take_in(*engine_, this->selection());
  for (const auto& unit : engine_->units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto slice = unit->main_slice(i);
      if (slice.numel == 0 || !updates(*unit, i)) continue;
      pieces_.push_back({.unit = unit.get(),
                         .parameter = i,
                         .group = groups_.index_of(unit->parameters[i].name),
                         .value = unit->main.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel),
                         .gradient = {},
                         .state = {}});
    }
  }
}

bool Parameterwise::updates(const engine::Unit& unit, std::size_t parameter) const {
  return unit.parameters[parameter].trainable && selection_(unit, parameter);
}

const ParameterPiece* Parameterwise::find(const engine::Unit& unit, std::size_t parameter) const {
  const auto found =
      std::find_if(pieces_.begin(), pieces_.end(), [&](const auto& piece) { return piece.unit == &unit && piece.parameter == parameter; });
  return found == pieces_.end() ? nullptr : &*found;
}

std::int64_t Parameterwise::steps(const engine::Unit& unit, std::size_t parameter) const {
  const auto* piece = find(unit, parameter);
  return piece == nullptr ? 0 : piece->steps;
}

void Parameterwise::set_steps(const engine::Unit& unit, std::size_t parameter, std::int64_t steps) {
  if (const auto* piece = find(unit, parameter)) pieces_[static_cast<std::size_t>(piece - pieces_.data())].steps = steps;
}

std::vector<StateTensor> Parameterwise::state() {
  std::vector<StateTensor> tensors;
  for (auto& piece : pieces_) {
    if (piece.steps == 0) continue;
    if (piece.state.empty()) piece.state = make_state_(piece, memory_);
    for (std::size_t s = 0; s < kinds().size(); ++s) {
      tensors.push_back({.unit = piece.unit, .parameter = piece.parameter, .kind = kinds()[s], .values = piece.state[s]});
    }
  }
  return tensors;
}

void Parameterwise::step() {
  for (auto& piece : pieces_) {
    if (!piece.unit->main_gradient.valid || !piece.unit->parameters[piece.parameter].has_gradient) continue;
    if (!piece.gradient.defined()) {
      // This is done here, because a view of gradients can be taken only while they have memory.
      const auto slice = piece.unit->main_slice(piece.parameter);
      piece.gradient = piece.unit->main_gradient.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel);
    }
    if (piece.state.empty()) {
      piece.state = make_state_(piece, memory_);
    } else if (piece.steps == 0) {
      for (auto& state : piece.state) state.zero_();  // a load has set the count back
    }
    ++piece.steps;
    const auto& group = groups_[piece.group];
    memory_.with_state(*piece.unit, piece.state, [&] { update_(group, group.lr.now(), piece); });
  }
}

}  // namespace fsdp::optim
