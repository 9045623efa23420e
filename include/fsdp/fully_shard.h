#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/device_mesh.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/gather_format.h"
#include "fsdp/granularity.h"
#include "fsdp/mixed_precision.h"
#include "fsdp/offload.h"
#include "fsdp/placements.h"

/// Fully Sharded Data Parallel training on LibTorch.
namespace fsdp {

/// Says which modules become units of their own, by name ("layers.3") and module. The root is always one.
using UnitPredicate = std::function<bool(const std::string& name, const torch::nn::Module& module)>;

/// Every module of one of the given types: `fsdp::each<torch::nn::TransformerEncoderLayerImpl>()`.
template <typename... Modules>
UnitPredicate each() {
  return [](const std::string&, const torch::nn::Module& module) { return (... || (dynamic_cast<const Modules*>(&module) != nullptr)); };
}

/// Where the shards' first values come from.
enum class InitialValues : std::uint8_t {
  kOwn,        ///< From each rank's own parameters: all ranks must have initialised alike (the same seed).
  kFromRank0,  ///< From the first rank of each unit's mesh, which sends the others their shards, unit by unit, and its buffers. Nobody
               ///< looks at the others' values.
  kZero,       ///< From nowhere: shards are zero, and what deferred_init recorded for them does not run. A checkpoint is to be loaded
               ///< before they are used; nothing checks that.
};

/// What one unit has different from the others.
struct UnitSettings {
  /// Its own ranks to shard over: experts of a mixture, whose parameters differ between the ranks of another dimension. Undefined: the
  /// options' mesh. Its ranks must be a part of the options' mesh.
  DeviceMesh mesh = {};
  /// By how much the sum of the gradients of its mesh's ranks is divided; 0: by their number.
  double gradient_divide_factor = 0;
  std::optional<bool> reshard_after_forward = {};            ///< By default the options'.
  std::optional<MixedPrecisionPolicy> mixed_precision = {};  ///< By default the options'.
};

/// A parameter that is one piece already of a whole that other ranks hold, too (tensor parallelism): the pieces of the ranks of `mesh`, in
/// their order, one behind the other along `dim`. Their sizes along it may differ.
struct TensorParallel {
  DeviceMesh mesh;       ///< One dimension; the same for all parameters of a model.
  std::int64_t dim = 0;  ///< Of the parameter.
};

/// How fully_shard divides and trains a model. The defaults are FSDP2's, on all ranks.
struct FullyShardOptions {
  /// The ranks to shard over; by default all of them, on the CPU. With two dimensions, units are sharded over the last one, and replicated
  /// over the first (HSDP), or main parameters and optimizer state sharded over it as well (HFSDP): see outer_placements.
  DeviceMesh mesh = {};
  /// By default the whole module is one unit.
  UnitPredicate units = {};
  /// Modules that make up one unit together, by name: using one of them gathers all. (FSDP2's fully_shard of a list.) unit_settings are
  /// asked for the first one's.
  std::vector<std::vector<std::string>> unit_groups = {};
  /// Parameters that stay ordinary tensors, whole on every rank, with gradients of their own: the caller's to synchronize and to update.
  std::function<bool(const std::string& name, const at::Tensor& parameter)> ignore = {};
  /// What is sharded: parameters, gradients, optimizer state.
  Placements placements = Placements::optim_grads_params();
  /// Of the outer dimension of a 2-D mesh: no_shard (HSDP: the shards' gradients are all-reduced over it), or optim (HFSDP: main parameters
  /// and optimizer state are sharded over both dimensions, parameters and gradients over the inner one; needs optim_grads_params there).
  Placements outer_placements = Placements::no_shard();
  /// Whose values the parameters begin with.
  InitialValues initial_values = InitialValues::kOwn;
  /// With kOwn: compares the bytes of all ranks' parameters, by a checksum each, before they are given up. A difference is an Error on
  /// every rank that names the first unit, its first parameter, and two ranks; the module can't be used then.
  bool check_initial_values = false;
  /// Frees a unit's parameters once forward has moved on, to gather them again in backward; false keeps them in between.
  bool reshard_after_forward = true;
  /// With reshard_after_forward: so many neighbouring ranks (of one machine, say) keep a copy between them after forward, from which
  /// backward gathers. Divides the sharding dimension; 0: none is kept. (FSDP2's reshard_after_forward=k.)
  std::int64_t reshard_after_forward_size = 0;
  /// With reshard_after_forward: so many bytes of whole parameters stay gathered from forward into backward all the same, of the units that
  /// forward used first.
  std::int64_t keep_gathered_bytes = 0;
  /// How many units ahead all-gathers are started; 0 turns read-ahead off.
  int prefetch_depth = 1;
  /// Where each parameter may be cut; by default anywhere (element).
  std::function<Granularity(const std::string& name, const at::Tensor& parameter)> granularity = {};
  /// Dtypes of parameters and gradients; without a policy, everything stays in the parameters' own.
  std::optional<MixedPrecisionPolicy> mixed_precision = {};
  /// Which parameters are pieces of tensor-parallel wholes. They are sharded like others; checkpoints hold the wholes, norms count all
  /// pieces. Parameters that it says nothing of are the same on all ranks of that mesh. With it, save, load, norms and loss scaling are
  /// collective over both meshes.
  std::function<std::optional<TensorParallel>(const std::string& name, const at::Tensor& parameter)> tensor_parallel = {};
  /// In which bytes each parameter travels in all-gathers (share one format between parameters); null: in its compute dtype.
  std::function<std::shared_ptr<const GatherFormat>(const std::string& name, const at::Tensor& parameter)> gather_format = {};
  /// What lies in host memory. With HFSDP, kAll leaves the inner shards of the parameters on the device.
  Offload offload = Offload::kNone;
  /// What single units have different, by name ("" for the root) and module. The same on every rank, but for which ranks a mesh has.
  std::function<UnitSettings(const std::string& name, const torch::nn::Module& module)> unit_settings = {};
  /// At the end of each backward, looks for NaN in every parameter's gradient, before and after its reduction: an Error on all ranks names
  /// parameter, unit and ranks. Reads all gradients twice more; docs/tuning.md says what that costs. (Megatron-FSDP's option.)
  bool report_nan_in_param_grad = false;
  /// Reductions get a process group of their own, so that they and all-gathers do not wait for each other.
  bool separate_reduce_group = false;
};

/// Shards the parameters of `module`, in place, over the ranks of `options.mesh`. Any torch::nn module works unchanged: from now on its
/// parameters hold no memory until an operator touches them. Each rank keeps its own slice of its own values, so all ranks must have
/// initialised alike (the same seed), unless InitialValues says otherwise. Called once, on the root.
///
/// Parameters that deferred_init made are computed one after the other, each for as long as it takes to keep this rank's slice; buffers
/// that it made become ordinary tensors on the mesh's device.
///
/// A parameter that several modules share belongs to the closest common ancestor of the units that reach it.
///
/// Collective. Throws Error on every rank if the ranks' models or options differ, a parameter has a dtype that can't be sharded, is not
/// dense, or is not on the mesh's device, or the module is sharded already: it is then as it was. And where a value of a deferred
/// parameter can't be computed: the module can't be used then.
FSDPModule fully_shard(torch::nn::Module& module, FullyShardOptions options = {});

/// Undoes fully_shard: every parameter is an ordinary tensor with the whole value again. Collective.
void fully_unshard(torch::nn::Module& module);

}  // namespace fsdp
