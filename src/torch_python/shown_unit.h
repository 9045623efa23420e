#pragma once

#include <torch/extension.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hooks/hooked_unit.h"
#include "torch_python/gradient_wrap.h"

namespace fsdp::torch_python {

/// The form of a unit's parameters that is registered on its modules. show(), show_post_forward() and hide() change it, from any form to
/// any other.
enum class Shown : std::uint8_t {
  kShards,
  kWhole,
  kPostForward,  ///< This rank's part of the copy on the post-forward mesh.
};

/// A unit together with the Python modules that have its parameters. Members need the GIL, unless their comment states otherwise.
class ShownUnit final : public hooks::HookedUnit {
 public:
  /// Needs no GIL, and may be collective. It is freed with the GIL held: see freed_with_gil.
  explicit ShownUnit(hooks::UnitSpec spec);

  /// Sets the parameter that modules have between steps, and the one that they have while they compute.
  void set_parameters(std::size_t i, pybind11::object shard, pybind11::object whole);
  void set_leaf(std::size_t i, const at::Tensor& leaf);
  /// Sets the parameter that modules have between forward and backward if the unit has a post-forward mesh; without one, they have the
  /// shard.
  void set_post_forward(std::size_t i, pybind11::object parameter) { parameters_.at(i).post_forward = std::move(parameter); }
  /// Adds a module that has parameter i under `name`. The parameter is written directly into `parameters`, the module's dictionary. If
  /// `module` (a weak reference) is given, it is set by setattr instead, for modules that do more when a parameter is set.
  void add_place(std::size_t i, pybind11::dict parameters, pybind11::str name, pybind11::object module);
  void show();
  void show_post_forward();
  void hide();
  /// Needs no GIL.
  void entered_by_backward() override;

  /// Call it when the unit is about to be used; `begins_forward`: a forward of one of its modules begins. Registers the unsharded
  /// parameters on the modules.
  void enter(bool begins_forward);
  /// Call it when a forward of the unit ends, through whose outputs backward will enter it. With `hides`, registers the shards on the
  /// modules. Returns false if an outer forward of it has not ended.
  bool leave(const std::vector<at::Tensor>& outputs, bool hides);
  /// Does what leave() does for a forward of the unit's only module whose output is one tensor, and returns true. Returns false, and does
  /// nothing, if that is not so, if a backward repeats the forward, if the unit has a post-forward mesh, or if the output is a view.
  bool leave_by(const pybind11::object& output);
  /// Gathers the unit. With `wait`, registers the unsharded parameters on the modules.
  void unshard(bool wait);
  /// Registers the shards on the modules. If a model has the unit, the unsharded parameters are freed.
  void reshard();
  /// `local` is a Python function, or None; see HookedModel::collect_gradients.
  void collect_gradients(std::size_t i, const at::Tensor& leaf, pybind11::object local);
  void set_prefetch(bool backward, const std::vector<std::shared_ptr<ShownUnit>>& others);
  /// False if a module has another parameter in a place than the registered one, if a parameter that was frozen when the unit was made is
  /// to be trained now, if a shard has become another tensor, or if a shard was given other memory (`data`, `_local_tensor`).
  bool has_its_parameters();
  /// True if a shard has a gradient.
  bool has_gradients() const;
  /// Call it when a root forward begins. Modules then show shards, unless the whole parameters are present and stay. These then get the
  /// requires_grad of the shards.
  void settle();

  /// Sets how gradients of parameter i are made from this rank's rows: see GradientWrap.
  void set_wrap(std::size_t i, pybind11::object wrap) { parameters_.at(i).wrap = GradientWrap(std::move(wrap)); }
  /// Makes the reduced gradients, if there are any, the gradients of the shards, or adds them to those. Appends the shards that have hooks
  /// on accumulated gradients, which the caller has to run, to `with_hooks`.
  ///
  /// Returns true if some shard has hooks on its gradient (register_hook): autograd does not compute the gradient of a shard, so it never
  /// calls such hooks.
  bool deliver(const std::vector<std::optional<at::Tensor>>& gradients, std::vector<pybind11::object>& with_hooks);
  /// Returns the DTensors whose `data` was assigned since set_parameters. The assignment has no effect: it exchanges the wrapper's own
  /// memory, which is empty, and leaves the rows as they are.
  std::vector<std::size_t> with_assigned_data() const;

  /// Whether the program has set a hook on the unit's reduced gradients, which the front end calls.
  bool has_all_reduce_hook = false;

 private:
  struct Place {
    pybind11::dict parameters;
    pybind11::str name;
    pybind11::object module;
  };
  struct Parameter {
    pybind11::object shard;
    const c10::TensorImpl* tensor = nullptr;  ///< The shard's TensorImpl. swap_tensors gives the Python object another one.
    pybind11::object whole;
    pybind11::object post_forward;
    const c10::StorageImpl* own_memory =
        nullptr;  ///< The storage of the shard when it was set (a DTensor's is empty). It is compared, and never read.
    std::vector<Place> places;
    /// The tensor of set_leaf(). Without this reference, each use of the engine's weak one would acquire and release the GIL.
    at::Tensor leaf;
    GradientWrap wrap;
    bool trained = false;  ///< The requires_grad that the shard and the other form had when the other form was last registered. If one of
                           ///< them differs now, it was changed.
    std::uint32_t version = 0;  ///< The version of the unsharded form when modules began to have it.

    /// Returns the parameter in this form. If there is no form on the post-forward mesh, it is the shard.
    const pybind11::object& as(Shown form) const {
      if (form == Shown::kWhole) return whole;
      return form == Shown::kPostForward && post_forward ? post_forward : shard;
    }
  };
  bool has_its_rows(std::size_t i) const;
  void train_as_shards(Shown form);
  void take_trainability();
  void put(Shown form);
  std::uint32_t version_of(std::size_t i) const;
  void warn_of_lost_writes() const;

  std::vector<Parameter> parameters_;
  Shown shown_ = Shown::kShards;
};

}  // namespace fsdp::torch_python
