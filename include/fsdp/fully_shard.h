#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "fsdp/device_mesh.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/gather_format.h"
#include "fsdp/grad_comm_format.h"
#include "fsdp/granularity.h"
#include "fsdp/memory_budget.h"
#include "fsdp/mixed_precision.h"
#include "fsdp/offload.h"
#include "fsdp/placements.h"

/// Fully Sharded Data Parallel training on LibTorch.
namespace fsdp {

/// Returns true for modules that become units, by name ("layers.3") and module. The root is always a unit.
using UnitPredicate = std::function<bool(const std::string& name, const torch::nn::Module& module)>;

namespace detail {

/// A holder's module; a module itself.
template <typename Module>
struct Held {
  using Type = Module;
};
template <typename Holder>
requires requires { typename Holder::ContainedType; }
struct Held<Holder> {
  using Type = typename Holder::ContainedType;
};

}  // namespace detail

/// Every module of one of the given types, which are modules or their holders: `fsdp::each<torch::nn::TransformerEncoderLayer>()`.
template <typename... Modules>
UnitPredicate each() {
  static_assert((... && std::is_base_of_v<torch::nn::Module, typename detail::Held<Modules>::Type>),
                "each<...>() takes classes of modules, or their holders");
  return [](const std::string&, const torch::nn::Module& module) {
    return (... || (dynamic_cast<const typename detail::Held<Modules>::Type*>(&module) != nullptr));
  };
}

/// Where the initial values of the shards come from.
enum class InitialValues : std::uint8_t {
  kOwn,        ///< From each rank's own parameters, which must be the same on all ranks (the same seed).
  kFromRank0,  ///< From the first rank of each unit's mesh, which sends the others their shards, unit by unit, and its buffers. The values
               ///< of the other ranks are ignored.
  kZero,       ///< Shards are zero, and what deferred_init recorded for them does not run. Load a checkpoint before you use them; nothing
               ///< checks this.
};

/// Settings of one unit that differ from the options of the model.
struct UnitSettings {
  /// The ranks over which this unit is sharded. Use it for experts of a mixture, whose parameters differ between the ranks of another
  /// dimension. Its ranks must be a part of the options' mesh. Undefined: the options' mesh.
  DeviceMesh mesh = {};
  /// The number by which the sum of the gradients of its mesh's ranks is divided. 0 stands for the number of these ranks.
  double gradient_divide_factor = 0;
  std::optional<bool> reshard_after_forward = {};            ///< By default, the value in FullyShardOptions.
  std::optional<MixedPrecisionPolicy> mixed_precision = {};  ///< By default, the value in FullyShardOptions.
  std::optional<GradCommFormat> grad_comm_format = {};       ///< By default, the value in FullyShardOptions.
};

/// Describes a parameter that is one piece of a larger tensor (tensor parallelism). The complete tensor consists of the pieces of the ranks
/// of `mesh`, in the order of the ranks, along `dim`. The sizes of the pieces along `dim` may differ.
struct TensorParallel {
  DeviceMesh mesh;       ///< One dimension; the same for all parameters of a model.
  std::int64_t dim = 0;  ///< The dimension of the parameter along which it is divided.
};

/// How fully_shard divides and trains a model. The defaults are FSDP2's. Give the same options on all ranks.
struct FullyShardOptions {
  /// The ranks to shard over; by default all of them, on the CPU. On a mesh of two dimensions, units are sharded over the last one. Over
  /// the first one, units are replicated (HSDP), or main parameters and optimizer state are sharded as well (HFSDP): see outer_placements.
  DeviceMesh mesh = {};
  /// Which modules become units; by default the whole module is one unit. If it accepts none, rank 0 warns.
  UnitPredicate units = {};
  /// Groups of modules, by name. Each group is one unit, so using one of its modules gathers all. (FSDP2's fully_shard of a list.)
  /// unit_settings is called with the first module of a group.
  std::vector<std::vector<std::string>> unit_groups = {};
  /// Parameters that are not sharded. They stay ordinary tensors on every rank, and the caller synchronizes their gradients and updates
  /// them.
  std::function<bool(const std::string& name, const at::Tensor& parameter)> ignore = {};
  /// What is sharded: parameters, gradients, optimizer state.
  Placements placements = Placements::optim_grads_params();
  /// What is sharded over the outer dimension of a 2-D mesh. no_shard (HSDP): nothing; the shards' gradients are all-reduced over it. optim
  /// (HFSDP): main parameters and optimizer state, which are then sharded over both dimensions, while parameters and gradients are sharded
  /// over the inner one. optim needs optim_grads_params as `placements`.
  Placements outer_placements = Placements::no_shard();
  /// Where the initial values of the parameters come from.
  InitialValues initial_values = InitialValues::kOwn;
  /// With kOwn: compares the ranks' parameters by a checksum of each, before they are sharded. If they differ, every rank throws an Error
  /// that names the first unit, its first parameter, and two ranks. The module can't be used then. Without it, ranks compare 64 elements of
  /// each parameter, and warn after the first backward if they differed and the program has not written other values since.
  bool check_initial_values = false;
  /// True frees a unit's parameters when forward has moved on, and gathers them again in backward. False keeps them gathered in between.
  bool reshard_after_forward = true;
  /// With reshard_after_forward: the size of the post-forward mesh. After forward, a copy of each unit stays sharded over so many
  /// neighbouring ranks (those of one machine, for example), and backward gathers from it. It must divide the size of the sharding
  /// dimension. 0 keeps no copy. (FSDP2's reshard_after_forward=k.)
  std::int64_t reshard_after_forward_size = 0;
  /// With reshard_after_forward: a budget in bytes for parameters that stay gathered between forward and backward nevertheless. The units
  /// that forward used first are kept.
  std::int64_t keep_gathered_bytes = 0;
  /// How many units ahead all-gathers are started; 0 turns read-ahead off.
  int prefetch_depth = 1;
  /// How much memory of its device each rank may use. fully_shard then chooses the following from a plan (fsdp/plan.h), so that the peak of
  /// every step stays within the budget: which units stay gathered between forward and backward (those that save most communication), and,
  /// only if nothing else fits, which units recompute, a smaller prefetch_depth, and offload of the optimizer state, in this order. All
  /// ranks choose the same. fully_shard throws Error on every rank if nothing fits; the error names the missing bytes, and an option that
  /// would help. It is an Error together with keep_gathered_bytes. explain() returns what was chosen.
  std::optional<MemoryBudget> memory_budget = {};
  /// Where each parameter may be cut; by default anywhere (element).
  std::function<Granularity(const std::string& name, const at::Tensor& parameter)> granularity = {};
  /// Dtypes of parameters and gradients. Without a policy, all have the parameters' own dtypes.
  std::optional<MixedPrecisionPolicy> mixed_precision = {};
  /// Which parameters are pieces of tensor-parallel parameters. The pieces are sharded like other parameters. Checkpoints contain the
  /// complete tensors, and norms count all pieces. Parameters for which it returns nothing must be the same on all ranks of that mesh. With
  /// this option, save, load, norms and loss scaling are collective over both meshes.
  std::function<std::optional<TensorParallel>(const std::string& name, const at::Tensor& parameter)> tensor_parallel = {};
  /// The format in which each parameter is all-gathered; null stands for its compute dtype. Share one format between parameters.
  std::function<std::shared_ptr<const GatherFormat>(const std::string& name, const at::Tensor& parameter)> gather_format = {};
  /// The format in which gradients are sent as messages, in 8 or 4 bits; without one, in the policy's dtype. Throws Error for parameters
  /// whose gradients are sent in float64.
  std::optional<GradCommFormat> grad_comm_format = {};
  /// What is kept in host memory. With HFSDP, kAll leaves the inner shards of the parameters on the device.
  Offload offload = Offload::kNone;
  /// Settings of single units, by name ("" for the root) and module. They must be the same on every rank, except for the ranks of meshes.
  std::function<UnitSettings(const std::string& name, const torch::nn::Module& module)> unit_settings = {};
  /// True looks for NaN in every parameter's gradient, before and after its reduction. If there is one, all ranks throw an Error at the end
  /// of backward that names parameter, unit and ranks. This reads all gradients twice more; docs/use/tuning.md has the cost.
  /// (Megatron-FSDP's option.)
  bool report_nan_in_param_grad = false;
  /// True makes a separate process group for reductions, so that they and all-gathers do not wait for each other.
  bool separate_reduce_group = false;
};

/// Shards the parameters of `module`, in place, over the ranks of `options.mesh`. Any torch::nn module works unchanged. From now on, its
/// parameters hold no memory until an operator uses them. Each rank keeps a shard of its own values, so the values must be the same on all
/// ranks (use the same seed), unless InitialValues takes them from elsewhere. Call it once, on the root.
///
/// Deferred parameters (deferred_init) are computed one after the other, and only this rank's shard of each is kept. Deferred buffers
/// become ordinary tensors on the mesh's device.
///
/// A parameter that several modules share belongs to the closest common ancestor of the units that reach it.
///
/// Collective. Throws Error on every rank, and leaves the module unchanged, if the ranks' models or options differ, if a parameter has a
/// dtype that can't be sharded, is not dense, or is not on the mesh's device, or if the module is sharded already. Throws Error on every
/// rank, too, if a value of a deferred parameter can't be computed; the module can't be used then.
FSDPModule fully_shard(torch::nn::Module& module, FullyShardOptions options = {});

/// Undoes fully_shard: every parameter is an ordinary, unsharded tensor again. Collective.
void fully_unshard(torch::nn::Module& module);

}  // namespace fsdp
