// fsdp plan: what training of a model will need, from its config.json.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "fsdp/simulate.h"
#include "plan/config_model.h"
#include "shard/unit_division.h"
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
  std::string svg;
  std::vector<std::string> compared;
  // Of the time of a step:
  double flops = 0;
  std::int64_t batch = 1;
  std::int64_t sequence = 0;
  std::uint64_t rate = 0;
  std::uint64_t replicate_rate = 0;
  double latency_us = 20;
  bool recomputes = false;
  double off = 0.1;
};

std::string read(const std::filesystem::path& given) {
  const auto path = std::filesystem::is_directory(given) ? given / "config.json" : given;
  std::ifstream file(path);
  if (!file) throw fsdp::Error(path.string() + " can't be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text << std::flush;
  if (!file) throw fsdp::Error(path.string() + " can't be written");
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

/// How long a rank computes for each unit: a multiplication and an addition in forward, and twice as many in backward.
std::map<std::string, fsdp::UnitTime> unit_times(const Options& options, const torch::nn::Module& model) {
  std::map<std::string, fsdp::UnitTime> times;
  const auto tokens = static_cast<double>(options.batch * options.sequence);
  for (const auto& item : model.named_modules()) {
    const auto* module = dynamic_cast<const fsdp::planning::ConfigModule*>(item.value().get());
    if (module == nullptr || module->multiplications == 0) continue;
    // Attention is causal: on average, a token looks at half of the sequence.
    const double attention = module->attention_width * static_cast<double>(options.sequence);
    const double forward_ms = 1e3 * 2 * tokens * (module->multiplications + attention) / options.flops;
    const bool is_block = !item.key().empty();
    times[fsdp::shard::shown(item.key())] = {.forward_ms = forward_ms,
                                             .backward_ms = (is_block && options.recomputes ? 3 : 2) * forward_ms};
  }
  return times;
}

fsdp::Simulation simulated(const Options& options, const fsdp::Plan& plan, std::map<std::string, fsdp::UnitTime> units, double slower) {
  fsdp::SimulationOptions rates{.units = std::move(units)};
  for (auto& [name, time] : rates.units) time = {time.forward_ms * slower, time.backward_ms * slower};
  for (const auto& link : plan.links) {
    const auto rate = link.dim == "replicate" && options.replicate_rate != 0 ? options.replicate_rate : options.rate;
    rates.links[link.dim] = {.latency_us = options.latency_us * slower, .bytes_per_s = static_cast<double>(rate) / slower};
  }
  return fsdp::simulate(plan, rates);
}

/// The time of a step, and its range if all rates are off.
struct Time {
  fsdp::Simulation middle;
  double from_ms = 0;
  double to_ms = 0;
  double tokens_per_second = 0;  // of a rank
};

Time time_of(const Options& options, const fsdp::Plan& plan, const torch::nn::Module& model) {
  const auto units = unit_times(options, model);
  const auto middle = simulated(options, plan, units, 1);
  return {.middle = middle,
          .from_ms = simulated(options, plan, units, 1 - options.off).average_ms(),
          .to_ms = simulated(options, plan, units, 1 + options.off).average_ms(),
          .tokens_per_second = 1e3 * static_cast<double>(options.batch * options.sequence) / middle.average_ms()};
}

std::string text_of(const Time& time) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << "\nTime of a step, simulated from the given rates: " << time.middle.average_ms() << " ms ("
       << time.from_ms << " to " << time.to_ms << "): computation " << time.middle.compute_ms << " ms, waits " << time.middle.exposed_ms
       << " ms. Tokens per second on each rank: " << time.tokens_per_second << "\n";
  return text.str();
}

std::string json_of(const fsdp::Plan& plan, const std::optional<Time>& time) {
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

/// Prints what two plans have, which --json has written: their bytes at the peak, what they send, and their times if both have them.
int compare(const std::string& first, const std::string& second) {
  const auto parse = [](const std::string& path) {
    try {
      auto json = nlohmann::json::parse(read(path));
      json.at("peak").at("device");
      return json;
    } catch (const nlohmann::json::exception&) {
      throw fsdp::Error(path + " is no plan; fsdp plan --json writes one");
    }
  };
  const auto a = parse(first);
  const auto b = parse(second);
  std::cout << std::left << std::setw(24) << "" << std::right << std::setw(20) << "A" << std::setw(20) << "B" << std::setw(10) << "B / A"
            << "\n";
  const auto row = [&](const std::string& name, double of_a, double of_b, int digits) {
    if (of_a == 0 && of_b == 0) return;
    std::ostringstream ratio;
    if (of_a > 0) ratio << std::fixed << std::setprecision(3) << of_b / of_a;
    std::cout << std::fixed << std::setprecision(digits) << std::left << std::setw(24) << name << std::right << std::setw(20) << of_a
              << std::setw(20) << of_b << std::setw(10) << ratio.str() << "\n";
  };
  const auto rows = [&](const char* group, int digits) {
    if (!a.contains(group) || !b.contains(group)) return;
    for (const auto& [name, value] : a[group].items()) {
      if (!value.is_number() || !b[group].contains(name)) continue;
      auto text = name;
      std::ranges::replace(text, '_', ' ');
      row(text, value.get<double>(), b[group][name].get<double>(), digits);
    }
  };
  std::cout << "At the peak, in bytes:\n";
  rows("peak", 0);
  std::cout << "The most in a step, in bytes:\n";
  if (a.contains("memory") && b.contains("memory")) {
    for (const auto& [name, use] : a["memory"].items()) {
      if (!b["memory"].contains(name)) continue;
      auto text = name;
      std::ranges::replace(text, '_', ' ');
      row(text, use.at("peak").get<double>(), b["memory"][name].at("peak").get<double>(), 0);
    }
  }
  std::cout << "Sent by a rank in a step, in bytes, and how often:\n";
  rows("wire", 0);
  if (a.contains("time") && b.contains("time")) std::cout << "Time:\n";
  rows("time", 1);
  return 0;
}

/// Options that a user may change, and what they change.
struct Variant {
  const char* option;
  const char* why;
  std::function<bool(Options&)> apply;  ///< False if the options are so already.
};

template <typename Value>
std::function<bool(Options&)> set(Value Options::*member, Value value) {
  return [member, value](Options& options) { return std::exchange(options.*member, value) != value; };
}

std::int64_t sent_by(const fsdp::Plan& plan) { return plan.wire.all_gather_bytes + plan.wire.reduce_scatter_bytes; }

double gib(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

/// Says which options would help: if the plan does not fit, those that make it fit, with none that is not needed, least costly ones first;
/// otherwise those that send less and still fit, a line each.
std::string recommendations(const Options& options, const torch::nn::Module& model, const fsdp::Plan& plan) {
  const auto memory = static_cast<std::int64_t>(options.memory);
  const bool fits = plan.fits(memory);
  const std::vector<Variant> less_memory = {
      {"without --keep", "units are gathered once more, for backward",
       [](Options& changed) { return std::exchange(changed.keeps, false) | (std::exchange(changed.keep_gathered, 0) != 0); }},
      {"with --placements optim_grads_params", "parameters are sharded, too", set<std::string>(&Options::placements, "optim_grads_params")},
      {"with --param-dtype bf16", "gathered parameters take half as much", set<std::string>(&Options::param_dtype, "bf16")},
      {"with --prefetch 0", "no unit is gathered ahead, so gathers are waited for", set(&Options::prefetch, 0)},
      {"with --hfsdp", "replicas share the main parameters and the optimizer's state",
       [](Options& changed) { return changed.replicas > 1 && !std::exchange(changed.shards_over_replicas, true); }},
      {"with --replicas 1", "all ranks share one copy of the model", set<std::int64_t>(&Options::replicas, 1)},
      {"with --offload state", "the optimizer's state is in host memory, where the CPU updates",
       set<std::string>(&Options::offload, "state")},
      {"with --offload all", "main parameters and gradients are in host memory, too", set<std::string>(&Options::offload, "all")},
  };
  const std::vector<Variant> less_sent = {
      {"with --keep", "units are gathered once in a step", set(&Options::keeps, true)},
      {"with --offload none", "the device updates, without the way to the host", set<std::string>(&Options::offload, "none")},
      {"with --reduce-dtype bf16", "gradients are sent in half as many bytes, and rounded",
       set<std::string>(&Options::reduce_dtype, "bf16")},
  };
  const auto plan_of = [&](const Options& tried) { return fsdp::plan(model, sharding(tried, tried.ranks), step(tried, model)); };
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  if (fits) {
    for (const auto& [option, why, apply] : less_sent) {
      auto tried = options;
      if (!apply(tried)) continue;
      const auto planned = plan_of(tried);
      if (!planned.fits(memory)) continue;
      text << "It also fits " << option << ", in " << gib(planned.peak.device()) << " GiB: " << why;
      if (sent_by(planned) < sent_by(plan)) text << "; a rank sends " << gib(sent_by(plan) - sent_by(planned)) << " GiB less";
      text << ".\n";
    }
    return text.str();
  }
  // What is not enough alone may be enough together.
  const auto with = [&](const std::vector<Variant>& variants) {
    auto tried = options;
    for (const auto& variant : variants) variant.apply(tried);
    return plan_of(tried);
  };
  std::vector<Variant> chosen;
  auto all = options;
  for (const auto& variant : less_memory) {
    if (!variant.apply(all)) continue;
    chosen.push_back(variant);
    if (!plan_of(all).fits(memory)) continue;
    for (std::size_t k = 0; k + 1 < chosen.size();) {  // Some may be needless with those after them.
      auto fewer = chosen;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(k));
      if (with(fewer).fits(memory)) {
        chosen = fewer;
      } else {
        ++k;
      }
    }
    text << "It fits in " << gib(with(chosen).peak.device()) << " GiB";
    for (const auto& [option, why, apply] : chosen)
      text << (&option == &chosen.front().option ? " " : ", ") << option << " (" << why << ")";
    text << ".\n";
    break;
  }
  return text.str();
}

int run(const Options& options) {
  if (!options.compared.empty()) return compare(options.compared[0], options.compared[1]);
  if (options.config.empty() || options.ranks == 0) throw fsdp::Error("give a config.json and --ranks, or --compare with two plans");
  const auto model = fsdp::planning::model_of_config(read(options.config));
  if (options.ranks % options.replicas != 0) {
    throw fsdp::Error(std::to_string(options.ranks) + " ranks do not divide by " + std::to_string(options.replicas) + " replicas");
  }
  const auto memory = static_cast<std::int64_t>(options.memory);
  const auto plan_for = [&](std::int64_t ranks) { return fsdp::plan(*model, sharding(options, ranks), step(options, *model)); };
  const auto plan = plan_for(options.ranks);
  const bool fits = options.memory == 0 || plan.fits(memory);
  std::optional<Time> time;
  if (options.flops > 0) time = time_of(options, plan, *model);
  std::cout << (options.json ? json_of(plan, time) + "\n" : plan.text() + (time ? text_of(*time) : ""));
  if (!options.svg.empty()) write(options.svg, plan.svg());
  if (!options.json && options.memory != 0) {
    std::cout << "\nIt " << (fits ? "fits" : "does not fit") << " into " << options.memory << " bytes"
              << (options.activations == 0 ? ", without activations" : "") << ".\n";
    std::cout << recommendations(options, *model, plan);
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
  command.add_option("config", options->config, "A config.json of Hugging Face, or the folder that has one");
  command.add_option("--ranks", options->ranks, "All of them")->check(CLI::PositiveNumber);
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
  command.add_option("--flops", options->flops, "Operations of a device in a second, as 400e12: prints the time of a step, too")
      ->check(CLI::PositiveNumber);
  command.add_option("--batch", options->batch, "Sequences of a rank in a step, for the time")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  auto* sequence = command.add_option("--sequence", options->sequence, "Tokens of a sequence, for the time")->check(CLI::PositiveNumber);
  auto* rate = command.add_option("--rate", options->rate, "Bytes that a rank sends in a second, as 50GB, for the time")
                   ->transform(CLI::AsSizeValue(false));
  command.get_option("--flops")->needs(sequence)->needs(rate);
  command.add_option("--replicate-rate", options->replicate_rate, "The same between replicas; otherwise as --rate")
      ->transform(CLI::AsSizeValue(false));
  command.add_option("--latency", options->latency_us, "Microseconds of each collective, for the time")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command.add_flag("--recompute", options->recomputes, "Blocks compute forward once more in backward (activation checkpointing)");
  command.add_option("--off", options->off, "By how much the rates may be off, for the range of the time")
      ->check(CLI::Range(0.0, 0.9))
      ->capture_default_str();
  command.add_option("--compare", options->compared, "Compares two plans that --json has written, instead of making one")->expected(2);
  command.add_option("--svg", options->svg, "Draws the memory over one step into this file");
  command.add_flag("--json", options->json, "Print JSON, in bytes");
  return [options] { return run(*options); };
}
