#include "fsdp/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "fsdp/error.h"

namespace fsdp {
namespace {

void validate(std::int64_t warmup_steps, std::int64_t total_steps) {
  if (warmup_steps < 0 || warmup_steps > total_steps) {
    throw Error("a schedule with " + std::to_string(warmup_steps) + " warm-up steps of " + std::to_string(total_steps) +
                " in total; give 0 <= warmup_steps <= total_steps");
  }
}

/// 1/n, 2/n, ... 1 in the n warm-up steps.
double warmup(std::int64_t step, std::int64_t warmup_steps) { return static_cast<double>(step + 1) / static_cast<double>(warmup_steps); }

/// 0 at the end of the warm-up, 1 from total_steps on.
double progress(std::int64_t step, std::int64_t warmup_steps, std::int64_t total_steps) {
  if (step >= total_steps) return 1;
  return static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps);
}

}  // namespace

LRSchedule constant_schedule(std::int64_t warmup_steps) {
  validate(warmup_steps, std::max<std::int64_t>(warmup_steps, 0));
  return [=](std::int64_t step) { return step < warmup_steps ? warmup(step, warmup_steps) : 1.0; };
}

LRSchedule linear_schedule(std::int64_t warmup_steps, std::int64_t total_steps, double final_factor) {
  validate(warmup_steps, total_steps);
  return [=](std::int64_t step) {
    if (step < warmup_steps) return warmup(step, warmup_steps);
    return 1.0 + (final_factor - 1.0) * progress(step, warmup_steps, total_steps);
  };
}

LRSchedule cosine_schedule(std::int64_t warmup_steps, std::int64_t total_steps, double final_factor) {
  validate(warmup_steps, total_steps);
  return [=](std::int64_t step) {
    if (step < warmup_steps) return warmup(step, warmup_steps);
    const double cosine = std::cos(std::numbers::pi * progress(step, warmup_steps, total_steps));
    return final_factor + (1.0 - final_factor) * 0.5 * (1.0 + cosine);
  };
}

}  // namespace fsdp
