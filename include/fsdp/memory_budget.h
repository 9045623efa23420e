#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp {

/// Optimizers of this library that plan() knows.
enum class PlannedOptimizer : std::uint8_t {
  kNone,         ///< No state. (SGD without momentum.)
  kSGDMomentum,  ///< One value per element.
  kAdamW,        ///< Two values per element.
};

/// The order in which a step enters units, by their names as in UnitInfo. A unit may be entered several times.
struct UnitOrder {
  std::vector<std::string> forward;   ///< Empty: the order of the modules.
  std::vector<std::string> backward;  ///< Empty: the order of forward in reverse.
};

/// Returns the order in which the last step of a sharded model has entered its units, for PlanOptions::order. Empty before the first step.
/// Call it between steps. Not collective. Throws Error if the module is not sharded.
UnitOrder recorded_order(const torch::nn::Module& module);

/// What plan() assumes of a training step: forward and backward of each microbatch, and an update, after which gradients are dropped
/// (zero_grad()).
struct PlanOptions {
  PlannedOptimizer optimizer = PlannedOptimizer::kAdamW;  ///< Whose state counts.
  /// By default, units are used in the order in which their modules were registered, and backward uses them in the reverse order; a
  /// module's own parameters are used before and after units within it. Give the order of models that use them otherwise, such as
  /// recorded_order().
  UnitOrder order = {};
  /// The bytes of activations that autograd keeps from a unit's forward to its backward, by unit name. What a program measured; not in
  /// here: 0.
  std::map<std::string, std::int64_t> activations = {};
  std::int64_t microbatches = 1;  ///< The backwards before each update, whose gradients add up.
  /// Whether each of these backwards reduces its gradients; otherwise only the last one does (set_requires_gradient_sync).
  bool sync_each_microbatch = true;
};

/// How much memory of its device a rank may use: see FullyShardOptions::memory_budget.
///
/// A program may offer to repeat the forward of some units in backward, by activation_checkpoint(). The budget says of which it needs that:
///
///     for (auto& block : blocks) x = fsdp::recomputes(*block) ? fsdp::activation_checkpoint(block, x) : block->forward(x);
///
/// If gradients of several backwards add up, give PlanOptions::microbatches. Where it was not given, the budget chooses again as soon as a
/// backward adds to earlier gradients, or a setting of FSDPModule makes a step need more, such as set_requires_gradient_sync(false). If
/// nothing fits then, that call throws Error.
struct MemoryBudget {
  std::int64_t bytes = 0;  ///< For the engine, the optimizer and the activations that `planned` gives; at least 1.
  /// What is assumed of a step. Give the optimizer that you will use, and activations as plan() takes them, if they count.
  PlanOptions planned = {};
  /// The units that a program can recompute, by name, and the bytes of activations that each keeps if it does: its inputs. The rest of
  /// its activations in `planned` is then there during its backward only. No other unit may lie within such a unit.
  std::map<std::string, std::int64_t> recomputable = {};
};

/// True if a memory budget has chosen that this unit's forward is repeated in backward, the same on all ranks. False for a module that is
/// no unit, and before fully_shard, so that one forward() serves all of them. Any thread may call it between steps and within them.
bool recomputes(const torch::nn::Module& unit);

/// Says what a memory budget has chosen for a sharded model, and why: a line for each option. Without a budget, one line says that all is
/// as it was given. Not collective. Throws Error if the module is not sharded.
std::string explain(const torch::nn::Module& module);

/// Chooses again what a memory budget leaves open, with activations that steps have measured: the bytes that stay from a unit's forward to
/// its backward if it does not recompute, by the unit's name. Units that are not named have none. Offload stays as it was. Values do not
/// change, and explain() then says what was chosen.
///
/// Collective over the mesh: call it between steps on all ranks. Of each number, the largest that any rank gives counts. Throws Error on
/// every rank if the model has no memory budget, if a name is no unit's or bytes are negative on any rank, or if nothing fits; all is then
/// as it was.
void adjust_memory_budget(torch::nn::Module& module, const std::map<std::string, std::int64_t>& activations);
/// The same with the most bytes that all units had together, which are divided equally among those below the root. Throws Error, too, if
/// units recompute.
void adjust_memory_budget(torch::nn::Module& module, std::int64_t activations);

}  // namespace fsdp
