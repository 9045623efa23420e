#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/device_mesh.h"
#include "fsdp/granularity.h"
#include "fsdp/placements.h"
#include "fsdp/stats.h"

namespace fsdp {

namespace engine {
class Engine;
}

/// Says which modules become units of their own, by name ("layers.3") and module. The root is always one.
using UnitPredicate = std::function<bool(const std::string& name, const torch::nn::Module& module)>;

/// Every module of one of the given types: `fsdp::each<torch::nn::TransformerEncoderLayerImpl>()`.
template <typename... Modules>
UnitPredicate each() {
  return [](const std::string&, const torch::nn::Module& module) { return (... || (dynamic_cast<const Modules*>(&module) != nullptr)); };
}

struct FullyShardOptions {
  /// The ranks to shard over; by default all of them, on the CPU.
  DeviceMesh mesh = {};
  /// By default the whole module is one unit.
  UnitPredicate units = {};
  Placements placements = Placements::optim_grads_params();
  /// Frees a unit's parameters once forward has moved on, to gather them again in backward; false keeps them in between.
  bool reshard_after_forward = true;
  /// How many units ahead all-gathers are started; 0 turns read-ahead off.
  int prefetch_depth = 1;
  /// Where each parameter may be cut; by default anywhere (element).
  std::function<Granularity(const std::string& name, const at::Tensor& parameter)> granularity = {};
};

/// A name, this rank's part of the tensor (1-D, a view into the engine's memory, possibly empty), and where it lies.
struct Shard {
  std::string name;                 ///< Fully qualified, as named_parameters() gives it.
  at::Tensor value;                 ///< 1-D, `numel` elements.
  std::vector<std::int64_t> shape;  ///< Of the whole parameter.
  std::int64_t offset = 0;          ///< Of value[0] in the flattened parameter, in elements.
};

/// The handle to a sharded module; the methods of FSDP2's FSDPModule. Cheap to copy; does not keep the module alive.
class FSDPModule {
 public:
  /// Gathers the parameters of the unit that this handle is for. Collective; not recursive (as FSDP2's).
  void unshard();
  /// Frees the gathered parameters of this handle's unit. Not recursive.
  void reshard();
  /// With false, backward keeps unreduced gradients on each rank instead of reducing them; the next backward with true reduces the sum.
  void set_requires_gradient_sync(bool requires_gradient_sync);
  void set_reshard_after_forward(bool reshard_after_forward);
  void set_prefetch_depth(int depth);
  /// After an exception in forward or backward: drops unreduced gradients and pending work; every unit is sharded again. Called by itself
  /// at the next forward after a failed backward. Collective if collectives were pending.
  void reset();
  /// Frees the reduced gradients and drops unreduced ones (set_requires_gradient_sync): the next backward starts from zero. (The module's
  /// own zero_grad() does nothing: gradients are in the shards, and the parameters' grad() stays undefined.)
  void zero_grad();

  /// This rank's shards of the main parameters, of all units. Write through them only with `main_parameters_changed()` after.
  std::vector<Shard> parameter_shards() const;
  /// This rank's shards of the reduced gradients; `value` is undefined where no rank had a gradient, and holds its memory beyond
  /// zero_grad().
  std::vector<Shard> gradient_shards() const;
  /// Says that the main parameters were written: gathered copies are dropped and the parameters' versions are bumped.
  void main_parameters_changed();

  /// Whole tensors by name, in the order of named_parameters(): collective and as large as the model. For tests and small models.
  std::vector<std::pair<std::string, at::Tensor>> full_parameters() const;
  std::vector<std::pair<std::string, at::Tensor>> full_gradients() const;

  MemoryStats memory_stats() const;
  void reset_peak_memory_stats();
  WireStats wire_stats() const;
  void reset_wire_stats();

  const std::shared_ptr<engine::Engine>& engine() const { return engine_; }
  FSDPModule(std::shared_ptr<engine::Engine> engine, std::size_t unit) : engine_(std::move(engine)), unit_(unit) {}

 private:
  std::shared_ptr<engine::Engine> engine_;
  std::size_t unit_;
};

/// Shards the parameters of `module`, in place, over the ranks of `options.mesh`. Any torch::nn module works unchanged: from now on its
/// parameters hold no memory until an operator touches them. Each rank keeps its own slice of its own values, so all ranks must have
/// initialised alike (the same seed). Called once, on the root.
///
/// A parameter that several modules share belongs to the closest common ancestor of the units that reach it.
///
/// Collective. Throws Error on every rank if the ranks' models or options differ, a parameter has a dtype that can't be sharded, is not
/// dense, or is not on the mesh's device, or the module is sharded already.
FSDPModule fully_shard(torch::nn::Module& module, FullyShardOptions options = {});

/// The handle of a module that fully_shard has seen, or whose ancestor's unit division made a unit. Throws Error otherwise.
FSDPModule handle(const torch::nn::Module& module);

/// Undoes fully_shard: every parameter is an ordinary tensor with the whole value again. Collective.
void fully_unshard(torch::nn::Module& module);

/// memory_stats() of the module's handle.
MemoryStats memory_stats(const torch::nn::Module& module);

}  // namespace fsdp
