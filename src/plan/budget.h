#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/planned_step.h"

// The choice of a memory budget, for a model that the caller makes and plans, in any language.
namespace fsdp::planning {

/// The settings that a budget chooses.
struct Choice {
  int prefetch_depth = 1;
  bool offloads_optimizer_state = false;
  std::vector<bool> kept = {};        ///< By unit: whether it stays gathered from forward into backward. Empty: none does.
  std::vector<bool> recomputed = {};  ///< By unit: whether backward repeats its forward. Empty: none is repeated.
};

struct Budget {
  std::int64_t bytes = 0;
  Choice given = {};                ///< The options as they were given; nothing is kept or recomputed.
  std::vector<bool> recomputable;   ///< By unit: whether its forward may be repeated.
  bool may_offload = false;         ///< Whether optimizer state may be offloaded that is not.
  std::string offload_option = {};  ///< The option that offloads optimizer state, for texts.
  std::string accumulation = {};    ///< How gradients of several backwards add up, for texts; empty if they do not.
  /// Plans steps with these options.
  std::function<Observed(const Choice& choice)> observe;
  /// Returns the largest value of any rank for each number. Collective. Empty: all ranks have this rank's plan.
  std::function<std::vector<std::int64_t>(std::vector<std::int64_t> numbers)> largest = {};
};

/// Returns Budget::accumulation. `reduced`: whether each of the backwards reduces its gradients.
std::string accumulation_text(const Microbatches& microbatches, bool reduced);

struct Chosen {
  Choice choice;
  bool fits = false;
  std::int64_t bytes = 0;   ///< The largest number of bytes that the device needs, with this choice, in any step.
  std::string moment;       ///< The moment at which a later step needs most.
  std::string explanation;  ///< The choice and its reasons, a line each, as explain() returns it.
};

/// Chooses the least costly options whose steps stay within the budget: those that were given; otherwise the same with units that
/// recompute, as few as possible by their elements; otherwise a smaller prefetch depth; otherwise offloaded optimizer state. With these
/// settings, the units stay gathered that save most communication. choose_kept finds them, and a plan of each choice confirms that it fits.
/// If nothing fits, `fits` is false, and the choice is the one that needs least.
///
/// A smaller budget never chooses more memory. All ranks with the same arguments, or with a common `largest`, choose alike.
Chosen choose(const Budget& budget);

/// Another option that may help if nothing fits, and the bytes that the device needs with it.
struct Remedy {
  std::string option;  ///< "offload = Offload::kAll"
  std::function<std::int64_t()> bytes;
};

/// Returns the text of the error for a budget with which nothing fits. It names the first of `remedies` that fits, or otherwise the one
/// that needs least.
std::string too_small(const Budget& budget, const Chosen& least, const std::vector<Remedy>& remedies);

}  // namespace fsdp::planning
