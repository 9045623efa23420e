#include "train_gpt/model_setup.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>
#include <string>
#include <vector>

namespace {

at::ScalarType dtype_of(const std::string& name) { return name == "bf16" ? at::kBFloat16 : at::kFloat; }

bool is_hidden_matrix(const std::string& name) { return name.starts_with("blocks.") && name.find("norm") == std::string::npos; }

}  // namespace

fsdp::FullyShardOptions sharding_of(const Options& options, const fsdp::DeviceMesh& mesh) {
  fsdp::FullyShardOptions sharding{.mesh = mesh,
                                   .units = fsdp::each<GPTBlockImpl>(),
                                   .placements = fsdp::Placements::from_name(options.strategy),
                                   .outer_placements = fsdp::Placements::from_name(options.outer_strategy),
                                   .reshard_after_forward = !options.no_reshard_after_forward,
                                   .keep_gathered_bytes = options.keep_gathered_bytes,
                                   .prefetch_depth = options.prefetch,
                                   .offload = options.offload == "all"         ? fsdp::Offload::kAll
                                              : options.offload == "optimizer" ? fsdp::Offload::kOptimizerState
                                                                               : fsdp::Offload::kNone};
  sharding.mixed_precision =
      fsdp::MixedPrecisionPolicy{.param_dtype = dtype_of(options.param_dtype), .grad_comm_dtype = dtype_of(options.wire_dtype)};
  if (options.float8_gather) {
    const auto float8 = std::make_shared<const fsdp::GatherFormat>(fsdp::float8_blocks());
    sharding.gather_format = [float8](const std::string& name, const at::Tensor&) { return is_hidden_matrix(name) ? float8 : nullptr; };
  }
  if (options.optimizer == "muon") sharding.granularity = fsdp::whole_matrices(is_hidden_matrix);
  if (options.optimizer == "adamw8bit") {
    sharding.granularity = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::blocks(256); };
  }
  return sharding;
}

fsdp::Optimizer optimizer_of(const Options& options, GPT& model) {
  const auto no_decay = [](const std::string& name) {
    return name.find("norm") != std::string::npos || name.find("embedding") != std::string::npos;
  };
  const std::vector<fsdp::ParamGroup> groups{{.matches = no_decay, .weight_decay = 0.0}};
  const fsdp::AdamWOptions adamw{.lr = options.lr, .betas = {0.9, 0.95}, .weight_decay = options.weight_decay};
  if (options.optimizer == "muon") {
    // At AdamW's learning rate and weight decay: the size of updates is matched.
    return fsdp::Muon(*model,
                      {.lr = options.lr,
                       .weight_decay = options.weight_decay,
                       .adjust_lr = fsdp::AdjustLR::kMatchRMSAdamW,
                       .matrices = is_hidden_matrix,
                       .adamw = adamw},
                      groups);
  }
  if (options.optimizer == "adamw8bit") {
    return fsdp::AdamW8bit(*model, {.lr = options.lr, .betas = {0.9, 0.95}, .weight_decay = options.weight_decay}, groups);
  }
  return fsdp::AdamW(*model, adamw, groups);
}

double lr_factor(const Options& options, std::int64_t step, double progress) {
  const double warmup = std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(std::max<std::int64_t>(options.warmup, 1)));
  return warmup * (0.05 + 0.95 * 0.5 * (1 + std::cos(std::numbers::pi * progress)));
}
