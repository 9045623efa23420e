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

/// The training step that plan() assumes: forward and backward of each microbatch, and an update, after which gradients are dropped
/// (zero_grad()).
struct PlanOptions {
  PlannedOptimizer optimizer = PlannedOptimizer::kAdamW;  ///< The optimizer whose state is counted.
  /// By default, units are used in the order in which their modules were registered, and backward uses them in the reverse order; a
  /// module's own parameters are used before and after units within it. For models with another order, pass that order, such as
  /// recorded_order().
  UnitOrder order = {};
  /// The bytes of activations that autograd keeps from a unit's forward to its backward, by unit name, as measured by the program. Units
  /// that are missing here have 0.
  std::map<std::string, std::int64_t> activations = {};
  std::int64_t microbatches = 1;  ///< The backwards before each update, whose gradients add up.
  /// Whether each of these backwards reduces its gradients; otherwise only the last one does (set_requires_gradient_sync).
  bool sync_each_microbatch = true;
};

/// How much memory of its device a rank may use: see FullyShardOptions::memory_budget.
///
/// A program may offer to repeat the forward of some units in backward, by activation_checkpoint(). The budget chooses which of them do:
///
///     for (auto& block : blocks) x = fsdp::recomputes(*block) ? fsdp::activation_checkpoint(block, x) : block->forward(x);
///
/// If gradients of several backwards add up, set PlanOptions::microbatches. Otherwise the budget chooses again as soon as a backward adds
/// to earlier gradients. It also chooses again if a setting of FSDPModule makes a step need more, such as
/// set_requires_gradient_sync(false). If nothing fits then, that call throws Error.
struct MemoryBudget {
  std::int64_t bytes = 0;  ///< For the engine, the optimizer and the activations in `planned`; at least 1.
  /// The assumed step. Set the optimizer that you will use, and activations as for plan(), if the budget includes them.
  PlanOptions planned = {};
  /// The units that a program can recompute, by name, and the bytes of activations that each keeps if it does: its inputs. The rest of its
  /// activations in `planned` then exists during its backward only. No other unit may lie within such a unit.
  std::map<std::string, std::int64_t> recomputable = {};
};

/// True if a memory budget has chosen to repeat this unit's forward in backward; the same on all ranks. False for a module that is not a
/// unit, and before fully_shard, so that a program needs only one forward(). Any thread may call it at any time.
bool recomputes(const torch::nn::Module& unit);

/// Returns the choice of a memory budget for a sharded model, and the reasons: a line for each option. Without a budget, one line states
/// that the options are unchanged. Not collective. Throws Error if the module is not sharded.
std::string explain(const torch::nn::Module& module);

/// Makes the choices of a memory budget again, with measured activations: the bytes that stay from a unit's forward to its backward if it
/// does not recompute, by the unit's name. Units that are not named have none. Offload does not change. Values do not change, and explain()
/// then returns the new choices.
///
/// Collective over the mesh: call it between steps on all ranks. The largest number of any rank is used. Throws Error on every rank if the
/// model has no memory budget, if a name is not the name of a unit or bytes are negative on any rank, or if nothing fits; then nothing has
/// changed.
void adjust_memory_budget(torch::nn::Module& module, const std::map<std::string, std::int64_t>& activations);
/// adjust_memory_budget() with the peak of all units' bytes together, which is divided equally among the units below the root. It is also
/// an Error if units recompute.
void adjust_memory_budget(torch::nn::Module& module, std::int64_t activations);

}  // namespace fsdp
