#pragma once

#include <torch/extension.h>

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "hooks/hooked_model.h"
#include "torch_python/shown_unit.h"

namespace fsdp::torch_python {

/// The units of a model whose modules are Python's. Its own members need the GIL.
class ShownModel final : public hooks::HookedModel {
 public:
  using HookedModel::HookedModel;

  /// Does what HookedModel::begin_forward does, without the GIL. Modules then show shards, except of units that stay gathered.
  void begin_forward();
  /// Returns the positions of units whose modules have other parameters than they were given.
  std::vector<std::size_t> with_other_parameters();
  /// True if a shard has a gradient, to which the next backward adds.
  bool has_gradients() const;
  /// A backward has ended: modules show shards.
  void hide_after_backward();
  /// `callback` returns None if the Python object that it belongs to has been collected. The parameters get their gradients nevertheless.
  void on_backward_end(pybind11::function callback);
  /// Makes the reduced gradients of units the gradients of their shards, and then runs the shards' hooks on accumulated gradients: a shard
  /// that several units have gets the gradients of all of them before.
  ///
  /// `hooks`: by the positions of units, functions that are called first with all gradients of the unit, as one flat tensor.
  ///
  /// Returns the positions of units of which some shard has hooks on its gradient, which will not be called. Throws Error at the end if the
  /// gradients of a unit do not fit into one tensor for its hook; they are delivered nevertheless.
  std::vector<std::size_t> deliver_gradients(const std::map<std::size_t, pybind11::object>& hooks);

 private:
  ShownUnit& unit(std::size_t k) const { return static_cast<ShownUnit&>(*units()[k]); }
};

/// An optimizer that has parameters of these units is about to step. Needs no GIL.
void note_step(const std::vector<std::shared_ptr<ShownUnit>>& units);
/// It has stepped: see hooks::note_update.
void note_update(const std::vector<std::shared_ptr<ShownUnit>>& units);

}  // namespace fsdp::torch_python
