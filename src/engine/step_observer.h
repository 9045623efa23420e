#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

#include "comm/communicator.h"
#include "engine/unit.h"

namespace fsdp::engine {

/// Callbacks that inspect parameters and gradients during a step: see Observation. They are called under the engine's lock, in its stream,
/// must not call the engine, and must not keep a tensor beyond the call unless their comment allows it.
class StepObserver {
 public:
  virtual ~StepObserver() = default;

  /// The computation enters the unit: its unsharded parameters are about to be used.
  virtual void entered(const Unit& unit) = 0;
  /// The unit's unsharded parameters are about to be freed. They may be those of an earlier step if the unit was not entered since.
  virtual void frees(const Unit& unit) = 0;
  /// Autograd has delivered a gradient of this rank for one parameter, of any strides.
  virtual void arrived(const Unit& unit, std::size_t parameter, const at::Tensor& gradient) = 0;
  /// The unit's gradients, per trainable sub-buffer, are about to be reduced; in a rehearsal, to be dropped. Those of sub-buffers that are
  /// reduced at another moment are undefined. `of_one_backward` is false if they are a sum with those of earlier backwards. Called at the
  /// same moment by all ranks of the unit.
  virtual void collected(const Unit& unit, std::span<const at::Tensor> unreduced, bool of_one_backward) = 0;
  /// A reduce-scatter over `ranks` is about to begin, of the unit's sub-buffers from `sub_buffer` on, or of some of these. The tensors of
  /// `parts` may be kept until reduced(). Called at the same moment by all ranks of the unit, so that it may start collectives itself.
  virtual void reduces(const Unit& unit, std::size_t sub_buffer, comm::Communicator& ranks, std::span<const comm::ReducePart> parts,
                       double scale) = 0;
  /// The last such reduce-scatter of that sub-buffer has ended. Ranks call it at different moments.
  virtual void reduced(const Unit& unit, std::size_t sub_buffer) = 0;
};

}  // namespace fsdp::engine
