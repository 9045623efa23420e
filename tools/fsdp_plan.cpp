// fsdp plan: what training of a model will need.

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>

#include "base/text.h"
#include "checkpoint/output_file.h"
#include "command_line.h"
#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "plan_advice.h"
#include "plan_compare.h"
#include "plan_model.h"
#include "plan_question.h"
#include "plan_time.h"
#include "subcommands.h"

namespace fsdp::tools {
namespace {

std::string json_of(const Plan& plan, const std::optional<PlannedTime>& time) {
  if (!time) return plan.json();
  auto json = nlohmann::ordered_json::parse(plan.json());
  json["time"] = {{"step_ms", time->middle.average_ms()},
                  {"from_ms", time->from_ms},
                  {"to_ms", time->to_ms},
                  {"compute_ms", time->middle.compute_ms},
                  {"exposed_ms", time->middle.exposed_ms},
                  {"tokens_per_second", time->tokens_per_second}};
  return json.dump(2);
}

/// The smallest world that fits: a part of a host, or whole hosts.
std::optional<Plan> smallest_of(const PlanQuestion& question, const std::function<Plan(std::int64_t ranks)>& plan_for) {
  const auto per_host = std::max<std::int64_t>(question.ranks_per_host, 1);
  const auto of_hosts = smallest_world(plan_for, question.memory, std::lcm(per_host, question.replicas));
  if (!of_hosts || of_hosts->ranks > per_host) return of_hosts;
  const auto of_one = smallest_world(plan_for, question.memory, question.replicas, of_hosts->ranks);
  return of_one ? of_one : of_hosts;
}

int run(const PlanQuestion& question) {
  if (!question.compared.empty()) return compare_plans(question.compared[0], question.compared[1]);
  if (question.model.empty() || question.ranks == 0) throw Error("give a model and --ranks, or --compare with two plans");
  at::set_num_threads(1);  // Nothing here is worth waking threads, which spin while they wait.
  if (question.ranks % question.replicas != 0) {
    throw Error(std::to_string(question.ranks) + " ranks do not divide by " + std::to_string(question.replicas) + " replicas");
  }
  if (question.shards_over_replicas && (question.replicas == 1 || question.placements != "optim_grads_params")) {
    throw Error("--hfsdp shards over replicas what is sharded over the ranks of one: give --replicas, and no other --placements");
  }
  const auto model = model_of(question.model, question.flops > 0 ? question.sequence : 0);
  const auto plan_for = [&](std::int64_t ranks) {
    return fsdp::plan(*model.module, sharding(question, model, ranks), step(question, model));
  };
  const auto plan = plan_for(question.ranks);
  const bool fits = question.memory == 0 || plan.fits(question.memory);
  std::optional<PlannedTime> time;
  if (question.flops > 0) time = time_of(question, plan, model);
  std::cout << (question.json ? json_of(plan, time) + "\n" : plan.text() + (time ? text_of(*time) : ""));
  if (!question.svg.empty()) ckpt::write_output(question.svg, plan.svg());
  if (!question.json && question.memory != 0) {
    std::cout << "\nIt " << (fits ? "fits" : "does not fit") << " into " << bytes_text(question.memory)
              << (question.activations == 0 ? ", without activations" : "") << ".\n";
    std::cout << recommendations(question, model, plan);
    const auto least = smallest_of(question, plan_for);
    const bool has_hosts = least && question.ranks_per_host > 1 && least->ranks > question.ranks_per_host;
    if (least) {
      std::cout << "The smallest world that fits has " << least->ranks << (least->ranks == 1 ? " rank" : " ranks")
                << (has_hosts ? ", " + std::to_string(question.ranks_per_host) + " on each host" : "") << ".\n";
    }
    if (!least) std::cout << "It fits on no number of ranks with these options.\n";
  }
  return fits ? 0 : kFound;
}

}  // namespace

std::function<int()> add_plan(CLI::App& command) {
  const auto options = std::make_shared<PlanQuestion>();
  command.add_option("model", options->model,
                     "A config.json of Hugging Face, which the transformers of FSDP_PYTHON (default: python3) reads; safetensors files or "
                     "their index; or the folder of one of them");
  command.add_option("--ranks", options->ranks, "The number of ranks")->check(whole_number(1));
  command.add_option("--replicas", options->replicas, "The number of replicas of the sharded model (HSDP)")
      ->check(whole_number(1))
      ->capture_default_str();
  command.add_flag("--hfsdp", options->shards_over_replicas, "Shard main parameters and optimizer state over the replicas, too");
  command.add_option("--ranks-per-host", options->ranks_per_host, "The number of ranks of a host; 0: all ranks are on one host")
      ->check(whole_number(0))
      ->capture_default_str();
  add_size(command, "--memory", options->memory,
           "The memory of each device for the program, as in 80GB; the exit code is 0 if the model fits, else 1");
  command.add_option("--device", options->device, "The type of the ranks' devices")
      ->check(CLI::IsMember({"cuda", "cpu"}))
      ->capture_default_str();
  command.add_option("--placements", options->placements, "What is sharded")
      ->check(CLI::IsMember({"no_shard", "optim", "optim_grads", "optim_grads_params"}))
      ->capture_default_str();
  command.add_option("--param-dtype", options->param_dtype, "The dtype of gathered parameters; main parameters are fp32")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command.add_option("--reduce-dtype", options->reduce_dtype, "The dtype in which gradients are sent")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command.add_option("--offload", options->offload, "The data that are kept in host memory")
      ->check(CLI::IsMember({"none", "state", "all"}))
      ->capture_default_str();
  command.add_option("--optimizer", options->optimizer, "The optimizer, which determines the bytes of its state")
      ->check(CLI::IsMember({"adamw", "momentum", "none"}))
      ->capture_default_str();
  command.add_flag("--split-root", options->splits_root, "Make the embedding and the head units of their own, if they are not tied");
  command.add_flag("--keep", options->keeps, "Keep units gathered from forward to backward");
  add_size(command, "--keep-gathered", options->keep_gathered, "Keep up to this many bytes of units gathered from forward to backward");
  command.add_option("--prefetch", options->prefetch, "The number of units that are gathered ahead")
      ->check(whole_number(0))
      ->capture_default_str();
  add_size(command, "--activations", options->activations, "Bytes that autograd keeps of each block from forward to backward");
  auto* flops =
      command.add_option("--flops", options->flops, "Operations of a device per second, as in 400e12; with it, the time is simulated, too")
          ->check(positive_number());
  command.add_option("--batch", options->batch, "Sequences of a rank in a step, to simulate the time")
      ->check(whole_number(1))
      ->capture_default_str();
  auto* sequence =
      command.add_option("--sequence", options->sequence, "Tokens of a sequence, to simulate the time")->check(whole_number(1));
  auto* rate = add_size(command, "--rate", options->rate, "Bytes that a rank sends per second, as in 50GB, to simulate the time");
  flops->needs(sequence)->needs(rate);
  add_size(command, "--replicate-rate", options->replicate_rate, "Bytes that a rank sends per second between replicas (default: --rate)");
  command.add_option("--latency", options->latency_us, "Latency of each collective in microseconds, to simulate the time")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command.add_flag("--recompute", options->recomputes, "Blocks compute forward once more in backward (activation checkpointing)");
  command.add_option("--off", options->off, "The relative error of the rates, for the range of the time")
      ->check(CLI::Range(0.0, 0.9))
      ->capture_default_str();
  command.add_option("--compare", options->compared, "Compare two plans that --json has written, instead of making one")->expected(2);
  command.add_option("--svg", options->svg, "Draw the memory over one step into this file");
  command.add_flag("--json", options->json, "Print JSON, in bytes");
  return [options] { return run(*options); };
}

}  // namespace fsdp::tools
