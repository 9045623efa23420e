#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "fsdp/fully_shard.h"
#include "fsdp/memory_budget.h"
#include "plan_model.h"

namespace fsdp::tools {

/// What a user asks of `fsdp plan`.
struct PlanQuestion {
  std::string model;  ///< A config.json, safetensors files, or the folder that has one of them.
  std::string device = "cuda";
  std::int64_t ranks = 0;
  std::int64_t replicas = 1;
  std::int64_t ranks_per_host = 8;
  std::int64_t memory = 0;
  std::string placements = "optim_grads_params";
  std::string param_dtype = "bf16";
  std::string reduce_dtype = "fp32";
  std::string offload = "none";
  std::string optimizer = "adamw";
  std::int64_t keep_gathered = 0;
  std::int64_t activations = 0;
  int prefetch = 1;
  bool keeps = false;
  bool splits_root = false;  ///< The embedding and the head are units of their own.
  bool shards_over_replicas = false;
  bool json = false;
  std::string svg;
  std::vector<std::string> compared;
  // Of the time of a step:
  double flops = 0;
  std::int64_t batch = 1;
  std::int64_t sequence = 0;
  std::int64_t rate = 0;
  std::int64_t replicate_rate = 0;
  double latency_us = 20;
  bool recomputes = false;
  double off = 0.1;
};

/// Reads a whole file. Throws Error if it can't be read.
std::string read_text(const std::filesystem::path& path);

/// How the model would be sharded over this many ranks.
FullyShardOptions sharding(const PlanQuestion& question, const ModelShapes& model, std::int64_t ranks);
/// What is assumed of a step of it.
PlanOptions step(const PlanQuestion& question, const ModelShapes& model);

}  // namespace fsdp::tools
