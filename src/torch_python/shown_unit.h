#pragma once

#include <torch/extension.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hooks/hooked_model.h"
#include "hooks/hooked_unit.h"

namespace fsdp::torch_python {

/// Which form of a unit's parameters its modules have. Transitions: show(), show_kept() and hide(), from any to any.
enum class Shown : std::uint8_t {
  kShards,
  kWhole,
  kKept,  ///< What this rank keeps after forward, where neighbours keep a copy between them.
};

/// A unit together with the modules of Python that have its parameters. All members need the GIL.
class ShownUnit {
 public:
  explicit ShownUnit(hooks::UnitSpec spec);

  /// The parameter that modules have between steps, and the one that they have while they compute.
  void set_parameters(std::size_t i, pybind11::object shard, pybind11::object whole);
  /// The parameter that modules have between forward and backward, where neighbours keep a copy; without one, they have the shard then.
  void set_kept(std::size_t i, pybind11::object kept) { parameters_.at(i).kept = std::move(kept); }
  /// A module has parameter i as `name`: in its dictionary of parameters, which is written directly; or, where `module` (a weak reference)
  /// is given, by setattr, as the module does more than that when a parameter is set.
  void add_place(std::size_t i, pybind11::dict parameters, pybind11::str name, pybind11::object module);
  void show();
  void show_kept();
  void hide();
  /// False if some module has another parameter in a place than the one that it was given, if one that was frozen when the unit was made is
  /// to be trained now, if a shard has become another tensor, or if one was given other memory (`data`, `_local_tensor`).
  bool has_its_parameters();
  /// A root forward begins: modules show shards, unless the whole parameters are there and stay. Then these are trained as the shards are.
  void settle();

  /// How Python wraps a tensor of this rank's rows of parameter i as a gradient of its shard; None: as it is. Refers to nothing that refers
  /// to the unit: the garbage collector does not see it.
  void set_wrap(std::size_t i, pybind11::object wrap) { parameters_.at(i).wrap = std::move(wrap); }
  /// Reduced gradients, where there are any, become those of the shards, or are added to them; then the shards' hooks on accumulated
  /// gradients run.
  ///
  /// Returns true if some shard has hooks on its gradient (register_hook): autograd computes no gradient of a shard, and calls none.
  bool deliver(const std::vector<std::optional<at::Tensor>>& gradients);
  /// The DTensors whose `data` was assigned since set_parameters, in vain: that exchanges the wrapper's own memory, which is empty, and
  /// leaves the rows as they are.
  std::vector<std::size_t> with_assigned_data() const;

  const std::shared_ptr<hooks::HookedUnit>& hooked() const { return hooked_; }

  /// The program has a hook on its reduced gradients, which the front end has.
  bool has_all_reduce_hook = false;

 private:
  struct Place {
    pybind11::dict parameters;
    pybind11::str name;
    pybind11::object module;
  };
  struct Parameter {
    pybind11::object shard;
    const c10::TensorImpl* tensor = nullptr;  ///< The shard's; an exchange of tensors (swap_tensors) gives the object another one.
    pybind11::object whole;
    pybind11::object kept;
    const c10::StorageImpl* own_memory = nullptr;  ///< Of the shard when it was given; a DTensor's is empty. Compared, never read.
    std::vector<Place> places;
    pybind11::object wrap;
    bool trained = false;  ///< What the shard and the other form agreed upon when that was shown last: the one that differs was changed.

    /// The shard stands in for a kept form that there is not.
    const pybind11::object& as(Shown form) const {
      if (form == Shown::kWhole) return whole;
      return form == Shown::kKept && kept ? kept : shard;
    }
  };
  bool has_its_rows(std::size_t i) const;
  void train_as_shards(Shown form);
  void take_trainability();
  void put(Shown form);

  std::shared_ptr<hooks::HookedUnit> hooked_;
  std::vector<Parameter> parameters_;
  Shown shown_ = Shown::kShards;
};

}  // namespace fsdp::torch_python
