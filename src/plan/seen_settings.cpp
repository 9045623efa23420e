#include "plan/seen_settings.h"

#include <algorithm>

namespace fsdp::planning {
namespace {

/// A first backward, one that adds to its gradients, and a last one: further ones need no more.
constexpr std::int64_t kMicrobatches = 3;

}  // namespace

std::optional<SeenSettings> SeenSettings::grown(std::span<const std::unique_ptr<engine::Unit>> units, bool gradients_add_up) const {
  auto grown = *this;
  grown.units_.resize(units.size());
  grown.gradients_add_up_ = gradients_add_up_ || gradients_add_up;
  for (std::size_t k = 0; k < units.size(); ++k) {
    const auto& options = units[k]->options;
    auto& seen = grown.units_[k];
    seen.reshard_after_forward = seen.reshard_after_forward && options.reshards_after_forward();
    seen.reshard_after_backward = seen.reshard_after_backward && options.reshard_after_backward;
    seen.requires_gradient_sync = seen.requires_gradient_sync && options.requires_gradient_sync;
    // Without an outer dimension, it changes nothing.
    seen.requires_all_reduce = seen.requires_all_reduce && (options.requires_all_reduce || !units[k]->communicators.outer);
    const auto* facts = units[k]->place.facts;
    grown.is_last_backward_ = grown.is_last_backward_ && facts->is_last_backward;
    grown.manual_finalization_ = grown.manual_finalization_ || facts->manual_finalization;
  }
  if (grown == *this) return std::nullopt;
  return grown;
}

void SeenSettings::apply_to(engine::UnitOptions& options, std::size_t unit) const {
  if (units_.empty()) return;
  const auto& seen = units_[unit];
  if (!seen.reshard_after_forward && options.reshards_after_forward()) options.after_forward = engine::AfterForward::kUntilBackward;
  options.reshard_after_backward = seen.reshard_after_backward;
  options.requires_gradient_sync = seen.requires_gradient_sync;
  options.requires_all_reduce = seen.requires_all_reduce;
}

SeenSettings SeenSettings::synchronized() const {
  auto settings = *this;
  for (auto& unit : settings.units_) unit.requires_gradient_sync = unit.requires_all_reduce = true;
  return settings;
}

Microbatches SeenSettings::microbatches(const Microbatches& given) const {
  const bool add_up = gradients_add_up_ || !is_last_backward_ || manual_finalization_ || std::ranges::any_of(units_, [](const auto& unit) {
                        return !unit.requires_gradient_sync || !unit.requires_all_reduce;
                      });
  return {.count = add_up && given.count == 1 ? kMicrobatches : given.count,
          .leaves_reductions = !is_last_backward_,
          .manual_finalization = manual_finalization_};
}

}  // namespace fsdp::planning
