#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "hooks/hooked_unit.h"
#include "plan/planned_step.h"
#include "torch_python/shown_unit.h"

// Python's description of a planned model.
namespace fsdp::bindings {

/// A unit of a planned model, with the position of the one around it, and the bytes of its activations.
using GivenUnit = std::tuple<std::shared_ptr<torch_python::ShownUnit>, std::optional<std::size_t>, std::int64_t>;

/// An event of forward: "begin", "use" or "end", the unit, whether backward enters the unit when it comes back, and the parameters that are
/// used here first.
using GivenVisit = std::tuple<std::string, std::size_t, bool, std::vector<std::size_t>>;

planning::Passes passes_of(const std::vector<GivenVisit>& visits);

/// The engine of a planned model.
struct PlannedEngine {
  std::shared_ptr<engine::Engine> engine;
  std::vector<std::int64_t> of_optimizer = {};  ///< By unit: what torch's optimizer keeps for this rank's part of its trained parameters.

  /// `parent`: the position of the unit around it. `values`: how many the optimizer keeps for each element.
  engine::Unit& add(hooks::HookedUnit& unit, std::optional<std::size_t> parent, std::int64_t values);
  /// The optimizer's updates, for PlannedSteps: the first one makes its state.
  std::function<void(planning::Highest&)> updates() const;
};

}  // namespace fsdp::bindings
