#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "hooks/hooked_unit.h"

namespace fsdp::hooks {

/// The second trigger: modules tell, by hooks before and after forward and before backward, what paging finds out by itself. One model's
/// units and engine. Front ends call it without locks of their own (Python: without the GIL): the engine's lock is held while collectives
/// are waited for.
class HookedModel : public std::enable_shared_from_this<HookedModel> {
 public:
  explicit HookedModel(const engine::EngineOptions& options) : engine_(std::make_shared<engine::Engine>(options)) {}

  /// Takes a unit in; enclosing ones before enclosed ones. `parent`: its position among those, of the closest enclosing one.
  void add(const std::shared_ptr<HookedUnit>& unit, std::optional<std::size_t> parent);

  /// Gives the units back, for another model to take.
  void dissolve();

  /// A tensor whose version tells of writes to main parameters: a shard, or what front ends wrap around it.
  void watch_version(const at::Tensor& tensor) { watched_.push_back(tensor); }

  /// Called at the end of each backward, when gradients may be taken.
  void on_backward_end(std::function<void()> callback) { backward_ended_ = std::move(callback); }

  /// A forward of the model begins: recovers from a backward that failed, and looks whether the main parameters were written since the
  /// last time (by an optimizer, a load, the user).
  void begin_forward();
  /// The unit is about to be used by what this thread does: forward, backward, or a forward that is repeated within a backward.
  void enter(HookedUnit& unit);
  /// Backward is about to use the unit: as enter, and then the unit's `shown` callback.
  void enter_backward(HookedUnit& unit);
  /// Backward will enter and show the unit before it computes the gradient behind each of these tensors.
  void watch(const std::shared_ptr<HookedUnit>& unit, const std::vector<at::Tensor>& outputs);
  /// The gradient of leaf i, and those of later backwards, go to the engine.
  void collect_gradients(const std::shared_ptr<HookedUnit>& unit, std::size_t i, const at::Tensor& leaf);
  /// One gradient of this rank.
  void gradient(HookedUnit& unit, std::size_t i, const at::Tensor& gradient);

  /// The positions of units to which the last backward gave gradients, though it has neither entered them nor repeated their forward. Asked
  /// for once, at the end of each backward.
  std::vector<std::size_t> take_missed();

  engine::Engine& engine() { return *engine_; }
  const std::shared_ptr<engine::Engine>& shared_engine() const { return engine_; }

 private:
  void watch_backward();

  std::shared_ptr<engine::Engine> engine_;
  std::vector<std::shared_ptr<HookedUnit>> units_;
  std::vector<at::Tensor> watched_;
  std::int64_t versions_ = -1;  // the sum of their versions when a forward began last; at first, what no sum is
  std::function<void()> backward_ended_;
};

}  // namespace fsdp::hooks
