#include "plan_question.h"

#include <fstream>
#include <iterator>
#include <map>

#include "fsdp/error.h"
#include "fsdp/plan.h"

namespace fsdp::tools {
namespace {

at::ScalarType dtype_of(const std::string& name) {
  const std::map<std::string, at::ScalarType> dtypes = {{"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}};
  return dtypes.at(name);
}

}  // namespace

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw Error(path.string() + " can't be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

FullyShardOptions sharding(const PlanQuestion& question, const ModelShapes& model, std::int64_t ranks) {
  std::vector<MeshDim> dims = {{"shard", ranks / question.replicas}};
  if (question.replicas > 1) dims.insert(dims.begin(), MeshDim{"replicate", question.replicas});
  const std::map<std::string, Offload> offloads = {{"none", Offload::kNone}, {"state", Offload::kOptimizerState}, {"all", Offload::kAll}};
  FullyShardOptions sharding;
  sharding.mesh = planned_device_mesh(question.device, dims, {.ranks_per_host = question.ranks_per_host});
  sharding.units = [&model, splits_root = question.splits_root](const std::string& name, const torch::nn::Module& /*module*/) {
    return model.blocks.contains(name) || (splits_root && model.embedding_and_head.contains(name));
  };
  sharding.placements = Placements::from_name(question.placements);
  if (question.shards_over_replicas) sharding.outer_placements = Placements::optim();
  sharding.mixed_precision =
      MixedPrecisionPolicy{.param_dtype = dtype_of(question.param_dtype), .grad_comm_dtype = dtype_of(question.reduce_dtype)};
  sharding.offload = offloads.at(question.offload);
  sharding.keep_gathered_bytes = question.keep_gathered;
  sharding.reshard_after_forward = !question.keeps;
  sharding.prefetch_depth = question.prefetch;
  return sharding;
}

PlanOptions step(const PlanQuestion& question, const ModelShapes& model) {
  const std::map<std::string, PlannedOptimizer> optimizers = {
      {"adamw", PlannedOptimizer::kAdamW}, {"momentum", PlannedOptimizer::kSGDMomentum}, {"none", PlannedOptimizer::kNone}};
  PlanOptions step{.optimizer = optimizers.at(question.optimizer)};
  if (question.activations == 0) return step;
  for (const auto& block : model.blocks) step.activations[block] = question.activations;
  return step;
}

}  // namespace fsdp::tools
