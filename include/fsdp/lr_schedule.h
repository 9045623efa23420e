#pragma once

#include <cstdint>
#include <functional>

namespace fsdp {

/// Maps a step (from 0) to the factor by which the base learning rates are multiplied: `optimizer.set_lr_factor(schedule(step))`.
using LRSchedule = std::function<double(std::int64_t step)>;

/// Linear warm-up from 1/warmup_steps to 1, then constant.
LRSchedule constant_schedule(std::int64_t warmup_steps = 0);
/// Linear warm-up, then linear decay to `final_factor` at total_steps, then constant. Throws Error unless 0 <= warmup_steps <= total_steps.
LRSchedule linear_schedule(std::int64_t warmup_steps, std::int64_t total_steps, double final_factor = 0);
/// Linear warm-up, then half a cosine down to `final_factor` at total_steps, then constant. Throws as linear_schedule. (Loshchilov and
/// Hutter, 2017.)
LRSchedule cosine_schedule(std::int64_t warmup_steps, std::int64_t total_steps, double final_factor = 0);

}  // namespace fsdp
