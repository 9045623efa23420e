#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/mixed_precision.h"
#include "fsdp/stats.h"
#include "fsdp/unit_info.h"

namespace fsdp {

struct ClipGradNormOptions;

namespace engine {
class Engine;
}

/// This rank's part of a tensor (1-D, a view into the engine's memory, possibly empty), with its name and its place in the whole.
struct Shard {
  std::string name;                 ///< Fully qualified, as named_parameters() gives it.
  at::Tensor value;                 ///< 1-D, possibly empty.
  std::vector<std::int64_t> shape;  ///< The shape of the unsharded parameter; of a tensor-parallel one, the shape of this rank's piece.
  std::int64_t offset = 0;          ///< The position of value[0] in the flattened parameter, in elements.
  std::vector<std::int64_t> global_shape;   ///< The shape of the complete tensor-parallel parameter; otherwise `shape`.
  std::vector<std::int64_t> global_offset;  ///< Where this rank's piece begins in that tensor; otherwise zeros.
};

/// A started all-gather of a unit's parameters.
class UnshardHandle {
 public:
  /// For the library's own use.
  explicit UnshardHandle(std::function<void()> wait) : wait_(std::move(wait)) {}
  /// Blocks until the parameters may be used. Operators wait by themselves, so this is not needed before one uses them.
  void wait() { wait_(); }

 private:
  std::function<void()> wait_;
};

/// The handle to a sharded module, with the methods of FSDP2's FSDPModule. It is cheap to copy and does not keep the module alive. Methods
/// with `recurse` apply to this handle's unit and, if `recurse` is true, to the units within it.
class FSDPModule {
 public:
  /// Gathers the parameters of this handle's unit. They stay until the unit is used (and are then freed as after any use), until reshard(),
  /// or until the parameters change. Collective; not recursive (as FSDP2's).
  void unshard();
  /// unshard() without waiting.
  UnshardHandle unshard_async();
  /// Frees the gathered parameters of this handle's unit. Not recursive.
  void reshard();
  /// With false, backward keeps unreduced gradients on each rank instead of reducing them; the next backward with true reduces the sum.
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true);
  /// On a 2-D mesh, with false, backward reduces gradients over the inner dimension only; the next backward with true reduces their sum
  /// over the outer one.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  /// With false, the end of backward does not wait for the last reductions: they overlap with the next forward. The next backward waits for
  /// them, or finish_gradient_sync(), which the optimizers of this library call themselves.
  void set_is_last_backward(bool is_last_backward);
  /// Waits for reductions that are still running. (Megatron-FSDP's finish_grad_sync.)
  void finish_gradient_sync();
  /// Sets the number by which the sum of all ranks' gradients is divided, from the next reduction on. 0 stands for the number of ranks (the
  /// default). To divide by a number that is known only after the forward, such as a count of tokens, set 1 and call scale_gradients().
  /// Throws Error if negative.
  void set_gradient_divide_factor(double factor, bool recurse = true);
  /// Multiplies the reduced gradients of all units.
  void scale_gradients(double factor);
  /// Sets FullyShardOptions::reshard_after_forward from the next forward on.
  void set_reshard_after_forward(bool reshard_after_forward, bool recurse = true);
  /// With false, parameters stay gathered after backward. The next forward then gathers nothing, unless parameters have changed.
  void set_reshard_after_backward(bool reshard_after_backward, bool recurse = true);
  /// Sets FullyShardOptions::prefetch_depth for all units of the model. Throws Error if negative.
  void set_prefetch_depth(int depth);
  /// With true, the next allocations of buffers for the model's collectives use the process group's own allocator, if its backend has one
  /// (NCCL's user buffers). Units share their buffers, so one group's allocator serves all of them. Backends without such an allocator,
  /// such as Gloo, keep the ordinary one. Call it with the same value on all ranks. (FSDP2's method of this name; Megatron-FSDP's nccl_ub.)
  void set_allocate_memory_from_process_group_for_comm(bool enable);
  /// Sets the units whose all-gathers start when this handle's unit is entered in forward. By default (an empty list) these are the units
  /// that followed in the previous pass. They stay gathered until they are used, or until backward ends. Pass the same list on every rank.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  /// Like set_modules_to_forward_prefetch(), for backward.
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  /// Cleans up after an exception in forward or backward: drops unreduced gradients and pending gathers, and shards every unit again. First
  /// it waits for running reductions of an earlier backward (set_is_last_backward). After a backward that failed, it also drops reduced
  /// gradients, with a warning if some were from earlier backwards. The next forward after a failed backward does this by itself. Call it
  /// on all ranks, because it may wait for the other ranks' reductions.
  void reset();
  /// Frees the reduced gradients and drops unreduced ones (set_requires_gradient_sync): the next backward starts from zero. (The module's
  /// own zero_grad() has no effect: gradients are in the shards, and the parameters' grad() stays undefined.) Throws Error inside of a
  /// backward.
  void zero_grad();

  /// This rank's shards of the main parameters, of all units, in main_params_dtype. After you write to them, call
  /// `main_parameters_changed()`.
  std::vector<Shard> parameter_shards() const;
  /// This rank's shards of the reduced gradients. `value` is undefined if no rank had a gradient. A `value` that a program holds stays
  /// valid after zero_grad(); without zero_grad(), the next backward adds to it.
  std::vector<Shard> gradient_shards() const;
  /// fsdp::clip_grad_norm of the whole model (fsdp/gradient_norm.h, which has the options). Collective.
  double clip_grad_norm(double max_norm);
  /// clip_grad_norm() with options.
  double clip_grad_norm(double max_norm, const ClipGradNormOptions& options);
  /// Notifies the engine that the program has written to the shards of the main parameters. The engine drops gathered copies and bumps the
  /// parameters' versions. Collective: if main parameters are replicated (no_shard), ranks exchange their shards.
  void main_parameters_changed();

  /// Unsharded main parameters by name, in the order of named_parameters(). Collective. They take as much memory as the model, on every
  /// rank.
  std::vector<std::pair<std::string, at::Tensor>> full_parameters() const;
  /// Unsharded gradients by name, as full_parameters().
  std::vector<std::pair<std::string, at::Tensor>> full_gradients() const;

  /// All units of the model, enclosing ones first: `std::cout << sharded.units()` prints them as a table.
  std::vector<UnitInfo> units() const;

  /// The policy of this handle's unit, if it has one.
  std::optional<MixedPrecisionPolicy> mixed_precision() const;

  MemoryStats memory_stats() const;  ///< The memory of the whole model on this rank.
  void reset_peak_memory_stats();    ///< Sets peaks to the current values.
  WireStats wire_stats() const;      ///< The communication of the whole model on this rank since the start or the last reset.
  void reset_wire_stats();           ///< Sets all counts to 0.

  // For the library's own use.
  const std::shared_ptr<engine::Engine>& engine() const { return engine_; }  ///< The model's engine.
  std::size_t unit() const { return unit_; }                                 ///< The unit's number in that engine.
  /// The handle of a unit.
  FSDPModule(std::shared_ptr<engine::Engine> engine, std::size_t unit) : engine_(std::move(engine)), unit_(unit) {}

 private:
  std::shared_ptr<engine::Engine> engine_;
  std::size_t unit_;
};

/// The handle of a sharded model's root or of a module that is a unit of it. Throws Error for other modules.
FSDPModule handle(const torch::nn::Module& module);

/// A guard. During its lifetime, backwards of the module keep gradients on each rank instead of reducing them. The destructor restores each
/// unit's setting. (DistributedDataParallel's no_sync.) Throws Error if the module is not sharded.
class NoSync {
 public:
  /// Applies to all units of the module. Throws Error if the module is not sharded.
  explicit NoSync(const torch::nn::Module& module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<engine::Engine> engine_;
  std::vector<bool> found_;
};

/// memory_stats() of the module's handle.
MemoryStats memory_stats(const torch::nn::Module& module);

}  // namespace fsdp
