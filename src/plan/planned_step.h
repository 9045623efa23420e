#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fsdp/plan.h"
#include "plan/kept_units.h"
#include "plan/step_recorder.h"

// A training step without computation: the engine gets the notifications of a step, and does everything that it does in a run.
namespace fsdp::planning {

/// One moment of a pass.
///   kBegin, kEnd: a unit's modules begin and end to run. Hooks notify the engine of these.
///   kUse: parameters of a unit are used. Paging notifies the engine of these.
struct Visit {
  enum class What : std::uint8_t { kBegin, kUse, kEnd };
  What what = What::kUse;
  std::size_t unit = 0;
  bool enters = true;                       ///< False if backward needs no value of a parameter here.
  std::vector<std::size_t> gradients = {};  ///< In forward: parameters that are used here first. In backward: those that get gradients.
};

/// The events of forward and backward, in order.
struct Passes {
  std::vector<Visit> forward;
  std::vector<Visit> backward;
};

/// Returns the backward that visits the units of this forward in reverse order.
std::vector<Visit> reversed(const std::vector<Visit>& forward);

/// The trigger that notifies the engine.
enum class Trigger : std::uint8_t { kPaging, kHooks };

/// Computes the memory that a rank needs in each part of a step.
class Highest {
 public:
  explicit Highest(memory::Accounting& accounting);
  ~Highest();
  Highest(const Highest&) = delete;
  Highest& operator=(const Highest&) = delete;

  /// Memory that is not the engine's: activations, and the state of a program's own optimizer.
  PlanBytes outside;
  /// The part of the step from now on ("forward of 'blocks.3'").
  void at(const std::string& what);
  /// `outside` may have grown.
  void look();
  /// Forgets all moments, except for ever().
  void reset() { moments_.clear(); }

  const std::vector<PlannedMoment>& moments() const { return moments_; }
  /// The first of the moments that need most.
  const PlannedMoment& highest() const;
  /// The most of PlanBytes::device() in all steps.
  std::int64_t ever() const { return ever_; }

  /// The most bytes that slots lend, that lie elsewhere on the device, and both together, since the last call.
  struct Load {
    std::int64_t slots = 0;
    std::int64_t rest = 0;
    std::int64_t both = 0;
  };
  Load take_load();

 private:
  memory::Accounting& accounting_;
  std::int64_t ever_ = 0;
  Load load_;
  std::vector<PlannedMoment> moments_;
};

/// The bytes that autograd keeps for one unit.
struct UnitActivations {
  std::int64_t from_forward = 0;  ///< They stay from its forward to its backward.
  std::int64_t recomputed = 0;    ///< The additional bytes of its backward, which begins with a repetition of the forward.
};

/// The backwards before each update, whose gradients add up. All but the last are made with the settings that units have.
struct Microbatches {
  std::int64_t count = 1;
  bool leaves_reductions = false;    ///< All but the last leave reductions under way (StepSettings::is_last_backward).
  bool manual_finalization = false;  ///< They reduce nothing at their ends; the last one is followed by finalize_backward.
};

/// The part of a unit's state of these bytes on this rank that this rank writes into a checkpoint; several ranks may have the same state.
std::int64_t part_in_checkpoint(const engine::Unit& unit, std::int64_t bytes);

/// The bytes of units that keep `activations` from forward to backward, or only `kept_if_recomputed` if backward repeats their forward, as
/// `recomputed` states. All are by unit; with an empty `recomputed`, no forward is repeated.
std::vector<UnitActivations> unit_activations(const std::vector<std::int64_t>& activations,
                                              const std::vector<std::int64_t>& kept_if_recomputed = {},
                                              const std::vector<bool>& recomputed = {});

/// Used for a unit whose forward can't be repeated.
constexpr std::int64_t kNeverRecomputed = -1;

/// Data of each unit that may stay from forward into backward: unsharded parameters, or activations.
struct MayStay {
  /// By moment of the last step: the bytes that the device needs for it. The microbatch that needs most counts.
  std::vector<std::int64_t> loads;
  std::vector<Keepable> units;  ///< One per unit. Data that can't be kept, or stay anyway, save nothing.
};

/// The results of steps, for choosing options.
struct Observed {
  Plan plan;
  std::int64_t most = 0;  ///< The maximum of PlanBytes::device() over all steps: the first ones may need more than later ones.
  MayStay parameters;     ///< They save bytes of all-gathers.
  MayStay activations;    ///< Those of units that recompute. They save the repetition of a forward, counted by elements of parameters.
};

/// The steps of one planned model.
class PlannedSteps {
 public:
  /// `update` runs between the end of backward and the end of the step, in which gradients are dropped.
  PlannedSteps(std::shared_ptr<engine::Engine> engine, Passes passes, Trigger trigger, std::function<void(Highest&)> update);

  /// By unit.
  void set_activations(std::vector<UnitActivations> activations) { activations_ = std::move(activations); }
  void set_microbatches(const Microbatches& microbatches) { microbatches_ = microbatches; }

  /// Runs steps until they are alike, and returns the memory and communication of the last one.
  Plan run();
  /// Does the same, and returns the facts for choosing the data that stay. Call one of the two, once.
  Observed observe();

 private:
  /// The contents of memory at one moment of a step.
  struct Moment {
    Highest::Load load;
    std::vector<bool> present;  ///< By unit: whether it is gathered, or being gathered.
  };

  void step();
  void begin_microbatch(std::int64_t number);
  void forward();
  void backward(bool ends_step);
  void enter(const Visit& visit, engine::Pass pass);
  void compute(const Visit& visit, engine::Pass pass);
  void take_gradients();
  void drop_gradients();
  void note_moment();
  std::vector<std::int64_t> loads_of_parameters() const;
  std::vector<std::int64_t> loads_of_activations() const;
  Keepable parameters_of(const engine::Unit& unit) const;
  Keepable activations_of(const PlannedUnit& unit, std::size_t index) const;

  std::shared_ptr<engine::Engine> engine_;
  Passes passes_;
  Trigger trigger_;
  std::function<void(Highest&)> update_;
  std::vector<UnitActivations> activations_;
  Highest highest_;
  StepRecorder* recorder_ = nullptr;  // in the last step
  bool has_stepped_ = false;
  Microbatches microbatches_;
  std::vector<engine::UnitOptions> given_;  // the options of units in all microbatches but the last
  std::vector<bool> has_taken_;             // by unit: whether the program has gradients of it
  bool observes_ = false;
  std::vector<Moment> moments_;  // of the present step
  std::size_t moment_ = 0;       // in the present microbatch
  std::size_t first_of_backward_ = 0;
};

}  // namespace fsdp::planning
