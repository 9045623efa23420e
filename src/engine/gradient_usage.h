#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/gradient_accumulator.h"

namespace fsdp::engine {

/// [Usage is agreed] Ranks exchange before which departure from a unit its last gradient arrived, up to this number of departures; later
/// gradients are reduced at the end of backward. Each departure takes a bit per unit in the exchange. Blocks that one pass uses more than
/// three times, apart from each other, are rare.
constexpr int kLastDeparture = 4;

/// Ranks exchange which gradients a backward gave to units on the same ranks: which parameters had gradients, before which departure the
/// last one arrived, and which units have unreduced gradients. Afterwards all ranks have the same values for each parameter
/// (`has_gradient`, `partial`) and each unit (`reduced_at_departure`). Returns the units of which some rank has unreduced gradients.
/// Collective.
std::vector<GradientAccumulator*> exchange_usage(std::span<GradientAccumulator* const> gradients);

/// Exchanges which gradients had NaN on which rank, before or after their reduction in this backward. Throws Error on all of them if one
/// had. Needs reductions to have ended. `rank`: this rank's number, for the message. Collective.
void report_nan(std::span<const std::unique_ptr<GradientAccumulator>> gradients, std::int64_t rank);

/// Returns a 0-D tensor that is true if an element is NaN. The host does not wait for it.
at::Tensor any_nan(const at::Tensor& tensor);

}  // namespace fsdp::engine
