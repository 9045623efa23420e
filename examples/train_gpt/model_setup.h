#pragma once

#include <fsdp/fsdp.h>

#include <cstdint>

#include "gpt.h"
#include "train_gpt/options.h"

// What the options say about sharding, optimizer and schedule, as the library takes it.

fsdp::FullyShardOptions sharding_of(const Options& options, const fsdp::DeviceMesh& mesh);
fsdp::Optimizer optimizer_of(const Options& options, GPT& model);
/// Linear warm-up by steps, times a cosine from 1 to 0.05 by progress, as the number of steps is not known where --minutes decides.
double lr_factor(const Options& options, std::int64_t step, double progress);
