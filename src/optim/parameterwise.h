#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "optim/shard_optimizer.h"

namespace fsdp::optim {

/// This rank's part of one parameter.
struct ParameterPiece {
  engine::Unit* unit = nullptr;
  std::size_t parameter = 0;  ///< Its index in the unit.
  std::size_t group = 0;
  at::Tensor value;               ///< 1-D, not empty.
  at::Tensor gradient;            ///< Like value. It is made before the first update.
  std::vector<at::Tensor> state;  ///< The algorithm's state. It is made before the first update.
  std::int64_t steps = 0;         ///< Updates so far, this one included.

  const std::vector<std::int64_t>& shape() const { return unit->parameters[parameter].shape; }  ///< The shape of the unsharded parameter.
};

/// An algorithm whose updates are not elementwise, but depend on whole matrices or blocks. It updates each parameter separately.
class Parameterwise final : public BuiltInAlgorithm {
 public:
  using MakeState = std::function<std::vector<at::Tensor>(const ParameterPiece& piece, StateMemory& memory)>;
  using UpdatePiece = std::function<void(const GroupSettings& group, double lr, ParameterPiece& piece)>;

  /// `kinds` describes the tensors that make_state returns.
  Parameterwise(std::shared_ptr<engine::Engine> engine, Groups groups, Selection selection, std::vector<StateKind> kinds,
                MakeState make_state, UpdatePiece update);
  void step() override;
  bool updates(const engine::Unit& unit, std::size_t parameter) const override;
  std::int64_t steps(const engine::Unit& unit, std::size_t parameter) const override;
  void set_steps(const engine::Unit& unit, std::size_t parameter, std::int64_t steps) override;
  std::vector<StateTensor> state() override;

 private:
  const ParameterPiece* find(const engine::Unit& unit, std::size_t parameter) const;

  Selection selection_;
  MakeState make_state_;
  UpdatePiece update_;
  StateMemory memory_;
  std::vector<ParameterPiece> pieces_;
};

/// True if one rank owns all of a parameter, or every rank its own copy.
bool is_whole(const engine::Unit& unit, std::size_t parameter);

/// True if no boundary between ranks falls inside of a block of `block` elements, counted from the parameter's start.
bool is_cut_between_blocks(const engine::Unit& unit, std::size_t parameter, std::int64_t block);

}  // namespace fsdp::optim
