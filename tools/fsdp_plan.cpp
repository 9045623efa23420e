// fsdp plan: what training of a model will need, from its config.json.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "plan/config_model.h"
#include "subcommands.h"

namespace {

struct Options {
  std::string config;
  std::string device = "cuda";
  std::int64_t ranks = 0;
  std::int64_t replicas = 1;
  std::int64_t ranks_per_host = 8;
  std::uint64_t memory = 0;
  std::string placements = "optim_grads_params";
  std::string param_dtype = "bf16";
  std::string reduce_dtype = "fp32";
  std::string offload = "none";
  std::string optimizer = "adamw";
  std::uint64_t keep_gathered = 0;
  std::uint64_t activations = 0;
  int prefetch = 1;
  bool keeps = false;
  bool shards_over_replicas = false;
  bool json = false;
};

std::string read(const std::filesystem::path& given) {
  const auto path = std::filesystem::is_directory(given) ? given / "config.json" : given;
  std::ifstream file(path);
  if (!file) throw fsdp::Error(path.string() + " can't be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

at::ScalarType dtype_of(const std::string& name) {
  const std::map<std::string, at::ScalarType> dtypes = {{"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}};
  return dtypes.at(name);
}

fsdp::FullyShardOptions sharding(const Options& options, std::int64_t ranks) {
  std::vector<fsdp::MeshDim> dims = {{"shard", ranks / options.replicas}};
  if (options.replicas > 1) dims.insert(dims.begin(), fsdp::MeshDim{"replicate", options.replicas});
  const std::map<std::string, fsdp::Offload> offloads = {
      {"none", fsdp::Offload::kNone}, {"state", fsdp::Offload::kOptimizerState}, {"all", fsdp::Offload::kAll}};
  fsdp::FullyShardOptions sharding;
  sharding.mesh = fsdp::planned_device_mesh(options.device, dims, {.ranks_per_host = options.ranks_per_host});
  sharding.units = fsdp::each<fsdp::planning::ConfigLayer>();
  sharding.placements = fsdp::Placements::from_name(options.placements);
  if (options.shards_over_replicas) sharding.outer_placements = fsdp::Placements::optim();
  sharding.mixed_precision =
      fsdp::MixedPrecisionPolicy{.param_dtype = dtype_of(options.param_dtype), .grad_comm_dtype = dtype_of(options.reduce_dtype)};
  sharding.offload = offloads.at(options.offload);
  sharding.keep_gathered_bytes = static_cast<std::int64_t>(options.keep_gathered);
  sharding.reshard_after_forward = !options.keeps;
  sharding.prefetch_depth = options.prefetch;
  return sharding;
}

fsdp::PlanOptions step(const Options& options, const torch::nn::Module& model) {
  const std::map<std::string, fsdp::PlannedOptimizer> optimizers = {{"adamw", fsdp::PlannedOptimizer::kAdamW},
                                                                    {"momentum", fsdp::PlannedOptimizer::kSGDMomentum},
                                                                    {"none", fsdp::PlannedOptimizer::kNone}};
  fsdp::PlanOptions step{.optimizer = optimizers.at(options.optimizer)};
  if (options.activations == 0) return step;
  for (const auto& item : model.named_modules()) {
    const bool is_block = dynamic_cast<const fsdp::planning::ConfigLayer*>(item.value().get()) != nullptr;
    if (is_block) step.activations[item.key()] = static_cast<std::int64_t>(options.activations);
  }
  return step;
}

int run(const Options& options) {
  const auto model = fsdp::planning::model_of_config(read(options.config));
  if (options.ranks % options.replicas != 0) {
    throw fsdp::Error(std::to_string(options.ranks) + " ranks do not divide by " + std::to_string(options.replicas) + " replicas");
  }
  const auto memory = static_cast<std::int64_t>(options.memory);
  const auto plan_for = [&](std::int64_t ranks) { return fsdp::plan(*model, sharding(options, ranks), step(options, *model)); };
  const auto plan = plan_for(options.ranks);
  const bool fits = options.memory == 0 || plan.fits(memory);
  std::cout << (options.json ? plan.json() + "\n" : plan.text());
  if (!options.json && options.memory != 0) {
    std::cout << "\nIt " << (fits ? "fits" : "does not fit") << " into " << options.memory << " bytes"
              << (options.activations == 0 ? ", without activations" : "") << ".\n";
    const auto least =
        fsdp::smallest_world(plan_for, memory, std::lcm(std::max<std::int64_t>(options.ranks_per_host, 1), options.replicas));
    if (least) std::cout << "The smallest world that fits has " << least->ranks << " ranks.\n";
    if (!least) std::cout << "It fits on no number of ranks with these options.\n";
  }
  return fits ? 0 : fsdp::tools::kFound;
}

}  // namespace

std::function<int()> fsdp::tools::add_plan(CLI::App& command) {
  const auto options = std::make_shared<Options>();
  command.add_option("config", options->config, "A config.json of Hugging Face, or the folder that has one")->required();
  command.add_option("--ranks", options->ranks, "All of them")->required()->check(CLI::PositiveNumber);
  command.add_option("--replicas", options->replicas, "How many rows of ranks have a copy of the model each (HSDP)")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_flag("--hfsdp", options->shards_over_replicas, "Shard main parameters and optimizer state over the replicas, too");
  command.add_option("--ranks-per-host", options->ranks_per_host, "0: all are on one host")->capture_default_str();
  command.add_option("--memory", options->memory, "Of each device, for the program, as in 80GB; the exit code says whether it fits")
      ->transform(CLI::AsSizeValue(false));
  command.add_option("--device", options->device, "What the ranks compute on")
      ->check(CLI::IsMember({"cuda", "cpu"}))
      ->capture_default_str();
  command.add_option("--placements", options->placements, "What is sharded")
      ->check(CLI::IsMember({"no_shard", "optim", "optim_grads", "optim_grads_params"}))
      ->capture_default_str();
  command.add_option("--param-dtype", options->param_dtype, "Of gathered parameters; main parameters are fp32")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command.add_option("--reduce-dtype", options->reduce_dtype, "In which gradients are sent")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command.add_option("--offload", options->offload, "What is kept in host memory")
      ->check(CLI::IsMember({"none", "state", "all"}))
      ->capture_default_str();
  command.add_option("--optimizer", options->optimizer, "Whose state is kept")
      ->check(CLI::IsMember({"adamw", "momentum", "none"}))
      ->capture_default_str();
  command.add_flag("--keep", options->keeps, "Keep units gathered from forward to backward");
  command.add_option("--keep-gathered", options->keep_gathered, "Keep so many bytes of them")->transform(CLI::AsSizeValue(false));
  command.add_option("--prefetch", options->prefetch, "Units that are gathered ahead")->capture_default_str();
  command.add_option("--activations", options->activations, "Bytes that autograd keeps of each block from forward to backward")
      ->transform(CLI::AsSizeValue(false));
  command.add_flag("--json", options->json, "Print JSON, in bytes");
  return [options] { return run(*options); };
}
