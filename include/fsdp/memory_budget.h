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

/// What plan() assumes of a training step: forward, backward, and an update, after which gradients are dropped (zero_grad()).
struct PlanOptions {
  PlannedOptimizer optimizer = PlannedOptimizer::kAdamW;  ///< Whose state counts.
  /// By default, units are used in the order in which their modules were registered, and backward uses them in the reverse order. Give the
  /// order of models that use them otherwise.
  UnitOrder order = {};
  /// The bytes of activations that autograd keeps from a unit's forward to its backward, by unit name. What a program measured; not in
  /// here: 0.
  std::map<std::string, std::int64_t> activations = {};
};

/// How much memory of its device a rank may use: see FullyShardOptions::memory_budget.
struct MemoryBudget {
  std::int64_t bytes = 0;  ///< For the engine, the optimizer and the activations that `planned` gives; at least 1.
  /// What is assumed of a step. Give the optimizer that you will use, and activations as plan() takes them, if they count.
  PlanOptions planned = {};
};

/// Says what a memory budget has chosen for a sharded model, and why: a line for each option. Without a budget, one line says that all is
/// as it was given. Not collective. Throws Error if the module is not sharded.
std::string explain(const torch::nn::Module& module);

}  // namespace fsdp
