#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/unit.h"
#include "plan/planned_step.h"

namespace fsdp::planning {

/// The settings of a program between steps that affect the memory of a step: for each unit, the setting so far that needs most.
class SeenSettings {
 public:
  /// Returns the settings after adding those that the units have now; none if a step does not need more with them. `gradients_add_up`:
  /// whether a backward is about to add to the gradients of an earlier one.
  std::optional<SeenSettings> grown(std::span<const std::unique_ptr<engine::Unit>> units, bool gradients_add_up) const;

  /// Gives a unit its settings, which hold for all backwards of a step but the last.
  void apply_to(engine::UnitOptions& options, std::size_t unit) const;
  /// Does the same for backwards that reduce their gradients.
  SeenSettings synchronized() const;
  /// The backwards of a step, if the program has declared `given` of them.
  Microbatches microbatches(const Microbatches& given) const;
  bool gradients_add_up() const { return gradients_add_up_; }

  bool operator==(const SeenSettings&) const = default;

 private:
  struct OfUnit {
    bool reshard_after_forward = true;
    bool reshard_after_backward = true;
    bool requires_gradient_sync = true;
    bool requires_all_reduce = true;

    bool operator==(const OfUnit&) const = default;
  };

  std::vector<OfUnit> units_;
  bool gradients_add_up_ = false;
  bool is_last_backward_ = true;
  bool manual_finalization_ = false;
};

}  // namespace fsdp::planning
