#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/outside_transforms.h"
#include "engine/agreement.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "hooks/hooked_unit.h"

namespace fsdp::hooks {

/// Whether a backward may follow the last root forward. It does not depend on actions of a single rank, such as keeping an output.
///   any -> kDone           a root forward without grad mode begins, or a backward
///   any -> kNoGraph        a root forward in grad mode begins
///   kNoGraph -> kGraph     a unit's output has a gradient
enum class LastForward : std::uint8_t { kDone, kNoGraph, kGraph };

/// The second trigger, with the units and the engine of one model. Hooks of modules, before and after forward and before backward, notify
/// it of what paging detects by itself. Front ends call it without locks of their own (Python: without the GIL), because it holds the
/// engine's lock while it waits for collectives.
class HookedModel : public std::enable_shared_from_this<HookedModel> {
 public:
  explicit HookedModel(const engine::EngineOptions& options) : engine_(std::make_shared<engine::Engine>(options)) {}
  virtual ~HookedModel() = default;
  HookedModel(const HookedModel&) = delete;
  HookedModel& operator=(const HookedModel&) = delete;

  /// Adds a unit. Add enclosing units before those that they enclose. `parent`: the position of the closest enclosing unit.
  void add(const std::shared_ptr<HookedUnit>& unit, std::optional<std::size_t> parent);

  /// Call it when all units have been added. The ranks choose a number for the model, and compare their descriptions of it (engine::agree).
  /// If forward gathers nothing, one rank may run it alone, so the ranks compare when the first backward begins. Returns a
  /// warning if initial values differ.
  std::string agree(std::vector<engine::UnitText> texts);

  /// Releases the units, so that another model can use them.
  void dissolve();

  /// Watches a tensor whose version counter shows writes to main parameters: a shard, or a front end's wrapper of it. Only the counter is
  /// kept, because torch exchanges parameters (swap_tensors) only if nothing else refers to them.
  void watch_version(const at::Tensor& tensor) { watched_.push_back(tensor.unsafeGetTensorImpl()->version_counter()); }

  /// Called at the end of each backward, when gradients may be taken.
  void on_backward_end(std::function<void()> callback) { backward_ended_ = std::move(callback); }

  /// Sets the function that is called when an Error is about to leave one of this model's hooks into autograd. Autograd knows only torch's
  /// exceptions and the front end's; `rethrow` throws one of the latter.
  void on_error_in_backward(std::function<void(const Error&)> rethrow) { rethrow_ = std::move(rethrow); }

  /// Call it when a root forward begins. It recovers from a backward that failed, and ensures that units are gathered with the current
  /// values of the shards [Current when forward begins].
  void begin_forward();
  /// Between forwards: recovers as begin_forward does, and takes over what was written to shards, or that they have other memory now.
  /// Returns true if there was any of it.
  bool take_writes();
  /// Call it when an optimizer that has parameters of this model has stepped: what it has written until now is its update.
  void note_own_update() { updated_versions_ = sum_of_versions(); }
  /// The shards were written, whether there are signs of it or not.
  void parameters_changed();
  /// Between forwards, before the user gathers the unit: as begin_forward, for this unit alone, unless backward may still need what is
  /// there.
  void prepare_unshard(HookedUnit& unit);
  /// Call it when a module of the unit begins to run, in forward or in a forward that is repeated within a backward. Call
  /// end_unit_forward() at its end, even if it fails. That returns false if an outer forward of the unit has not ended.
  void begin_unit_forward(HookedUnit& unit);
  bool end_unit_forward(HookedUnit& unit);
  /// Call it when this thread is about to use the unit: in a forward, a backward, or a forward that is repeated within a backward.
  void enter(HookedUnit& unit);
  /// Call it when backward is about to use the unit. Does the same as enter, and then calls the unit's entered_by_backward().
  void enter_backward(HookedUnit& unit);
  /// From now on, backward enters the unit before it computes the gradient behind each of these tensors, which a forward of the unit
  /// returns. Outputs that are inputs of the forward are skipped, because their gradients are computed outside of the unit's backward. The
  /// graph of the outputs keeps the model alive.
  void watch(HookedUnit& unit, const std::vector<at::Tensor>& outputs);
  /// From now on, gradients of the leaf of parameter i go to the engine. If `local` is given, it first converts each of them: for a leaf
  /// that stands for tensors of several ranks (a DTensor), it returns this rank's part. It must not keep the model alive.
  void collect_gradients(HookedUnit& unit, std::size_t i, const at::Tensor& leaf, std::function<at::Tensor(const at::Tensor&)> local = {});
  /// One gradient of this rank.
  void gradient(HookedUnit& unit, std::size_t i, const at::Tensor& gradient);

  /// Returns the positions of units to which the last backward gave gradients, although it has neither entered them nor repeated their
  /// forward. Called once, at the end of each backward.
  std::vector<std::size_t> take_missed();
  /// Returns the positions of units whose parameters an optimizer has stepped between the forward and the last backward.
  std::vector<std::size_t> take_stale();

  /// The units in the order in which they were added. They exist as long as the model, which a graph may keep alive longer than the front
  /// end does. They must not keep the model alive.
  const std::vector<std::shared_ptr<HookedUnit>>& units() const { return units_; }
  /// The front end has warned that writes to unsharded parameters were lost, which it does once for each model.
  bool warned_of_lost_writes = false;

  const std::shared_ptr<engine::Engine>& engine() const { return engine_; }

  /// Runs `work` for a hook that autograd has called, and converts its errors.
  template <typename Work>
  void in_autograd(const Work& work) const {
    const OutsideTransforms outside;
    try {
      work();
    } catch (const Error& error) {
      if (rethrow_) rethrow_(error);
      throw;
    }
  }

 private:
  /// A forward of a unit's modules, and the number that autograd's next operator had when it began.
  struct UnitForward {
    const HookedUnit* unit;
    std::uint64_t first_operator;
  };

  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  /// A leaf that a forward of the unit has returned.
  struct WatchedLeaf {
    const HookedUnit* unit;
    WeakTensor leaf;
  };

  bool were_written();
  std::int64_t sum_of_versions() const;
  void watch_leaf(HookedUnit& unit, const at::Tensor& leaf);
  void watch_backward();
  void end_backward();

  std::shared_ptr<engine::Engine> engine_;
  std::vector<std::shared_ptr<HookedUnit>> units_;
  std::vector<c10::VariableVersion> watched_;
  std::vector<WatchedLeaf> watched_leaves_;
  std::vector<UnitForward> unit_forwards_;  // under way, the outermost first
  std::int64_t versions_ = -1;          // the sum of their versions when the last forward began; -1, which is no sum, before the first one
  std::int64_t updated_versions_ = -1;  // the sum when the last optimizer of this model had stepped
  std::uint64_t loads_ = 0;             // the number of loads then
  std::uint64_t updates_ = 0;           // the number of optimizer steps when the last forward began
  std::uint64_t steps_ = 0;             // the number of steps of optimizers that have parameters of its units
  LastForward last_forward_ = LastForward::kDone;
  bool captured_ = false;  // a forward has been captured as a part of a graph
  std::function<void()> backward_ended_;
  std::function<void(const Error&)> rethrow_;
  std::vector<engine::UnitText> to_agree_on_;  // texts that the first backward compares
};

/// Call it when an optimizer with sharded parameters has stepped. The unsharded parameters that models keep are then stale. Version
/// counters do not always show this, because kernels for lists of tensors do not increment them. Any thread may call it. All ranks call it
/// alike.
void note_update();
/// Does the same after a load, behind which gathers send parameters, and no differences.
void note_load();

}  // namespace fsdp::hooks
