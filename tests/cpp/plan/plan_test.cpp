// A plan against a run: the same bytes, kind by kind, and on the wire.

#include "fsdp/plan.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "gpt.h"
#include "support/hosts.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/other_locale.h"
#include "support/stack.h"

namespace plan_test {

using fsdp::FullyShardOptions;
using fsdp::MemoryStats;
using fsdp::MemoryUse;
using fsdp::Offload;
using fsdp::Placements;
using fsdp::Plan;
using fsdp::planned_device_mesh;
using fsdp::PlannedMeshOptions;
using fsdp::PlannedOptimizer;
using fsdp::PlanOptions;
using fsdp::WireStats;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;

constexpr int kStepsUntilAlike = 5;

GPT make_gpt(bool tied = false) {
  torch::manual_seed(5);
  return GPT(GPTConfig{.vocab = 61, .dim = 20, .layers = 3, .heads = 2, .hidden = 37, .context = 8, .tied = tied});
}

at::Tensor gpt_loss(GPT& model) {
  const auto tokens = at::arange(16).view({2, 8});
  return model->loss(tokens, tokens + 1);
}

/// What a real step needs and sends, once steps are alike.
template <typename Model>
std::pair<MemoryStats, WireStats> run(Model& model, const FullyShardOptions& options, const std::function<at::Tensor(Model&)>& loss,
                                      const PlanOptions& steps = {}) {
  auto sharded = fsdp::fully_shard(*model, options);
  fsdp::AdamW optimizer(*model, {});
  for (int step = 0; step <= kStepsUntilAlike; ++step) {
    if (step == kStepsUntilAlike) {
      sharded.reset_peak_memory_stats();
      sharded.reset_wire_stats();
    }
    for (std::int64_t k = 1; k <= steps.microbatches; ++k) {
      sharded.set_requires_gradient_sync(steps.sync_each_microbatch || k == steps.microbatches);
      loss(model).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return {sharded.memory_stats(), sharded.wire_stats()};
}

void expect_same(const char* name, const MemoryUse& planned, const MemoryUse& real) {
  EXPECT_EQ(planned.live, real.live) << name;
  EXPECT_EQ(planned.peak, real.peak) << name;
}

void expect_same(const MemoryStats& planned, const MemoryStats& real) {
  expect_same("main_parameters", planned.main_parameters, real.main_parameters);
  expect_same("main_gradients", planned.main_gradients, real.main_gradients);
  expect_same("gathered_parameters", planned.gathered_parameters, real.gathered_parameters);
  expect_same("unreduced_gradients", planned.unreduced_gradients, real.unreduced_gradients);
  expect_same("communication", planned.communication, real.communication);
  expect_same("optimizer_state", planned.optimizer_state, real.optimizer_state);
  expect_same("total", planned.total, real.total);
  expect_same("host", planned.host, real.host);
  expect_same("slots", planned.slots, real.slots);
}

void expect_same(const WireStats& planned, const WireStats& real) {
  EXPECT_EQ(planned.all_gather_bytes, real.all_gather_bytes);
  EXPECT_EQ(planned.reduce_scatter_bytes, real.reduce_scatter_bytes);
  EXPECT_EQ(planned.scatter_bytes, real.scatter_bytes);
  EXPECT_EQ(planned.control_bytes, real.control_bytes);
  EXPECT_EQ(planned.shared_memory_bytes, real.shared_memory_bytes);
  EXPECT_EQ(planned.all_gathers, real.all_gathers);
  EXPECT_EQ(planned.reduce_scatters, real.reduce_scatters);
}

struct Case {
  std::string text;
  FullyShardOptions options;
  bool has_outer = false;
};

/// Placements and meshes.
std::vector<Case> strategies() {
  std::vector<Case> cases;
  for (const bool has_outer : {false, true}) {
    for (const char* name : {"no_shard", "optim", "optim_grads", "optim_grads_params"}) {
      cases.push_back({std::string(name) + (has_outer ? ", HSDP" : ""), {.placements = Placements::from_name(name)}, has_outer});
    }
  }
  cases.push_back({"HFSDP", {.outer_placements = Placements::optim()}, true});
  return cases;
}

template <typename Change>
std::vector<Case> each_with(const std::vector<Case>& cases, const std::vector<std::pair<std::string, Change>>& changes) {
  std::vector<Case> all;
  for (const auto& one : cases) {
    for (const auto& [text, change] : changes) {
      auto& changed = all.emplace_back(one);
      changed.text += text;
      change(changed.options);
    }
  }
  return all;
}

using Change = std::function<void(FullyShardOptions&)>;

std::vector<Case> all_cases() {
  const fsdp::MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16, .grad_comm_dtype = at::kBFloat16};
  const std::vector<std::pair<std::string, Change>> dtypes = {{"", [](auto&) {}},
                                                              {", bf16", [bf16](auto& options) { options.mixed_precision = bf16; }}};
  const std::vector<std::pair<std::string, Change>> offloads = {
      {"", [](auto&) {}},
      {", state offloaded", [](auto& options) { options.offload = Offload::kOptimizerState; }},
      {", all offloaded", [](auto& options) { options.offload = Offload::kAll; }}};
  auto cases = each_with(each_with(strategies(), dtypes), offloads);
  std::vector<Case> sharded;
  for (const auto& one : strategies()) {
    if (one.options.placements == Placements::optim_grads_params()) sharded.push_back(one);
  }
  const std::vector<std::pair<std::string, Change>> keeps = {
      {", 7000 bytes kept", [](auto& options) { options.keep_gathered_bytes = 7000; }},
      {", not resharded", [](auto& options) { options.reshard_after_forward = false; }},
      {", not read ahead", [](auto& options) { options.prefetch_depth = 0; }},
      {", three read ahead", [](auto& options) { options.prefetch_depth = 3; }}};
  std::vector<Case> replicated;
  for (const auto& one : strategies()) {
    const auto& placements = one.options.placements;
    if (placements == Placements::optim() || placements == Placements::optim_grads()) replicated.push_back(one);
  }
  const auto differences = std::make_shared<const fsdp::GatherFormat>(fsdp::int4_differences({.block = 32}));
  const std::vector<std::pair<std::string, Change>> formats = {{", differences", [differences](auto& options) {
                                                                  options.gather_format = [differences](const std::string&,
                                                                                                        const at::Tensor& parameter) {
                                                                    return parameter.dim() > 1 ? differences : nullptr;
                                                                  };
                                                                }}};
  const auto gathered = each_with(each_with(replicated, formats), dtypes);
  cases.insert(cases.end(), gathered.begin(), gathered.end());
  const auto kept = each_with(each_with(sharded, keeps), dtypes);
  cases.insert(cases.end(), kept.begin(), kept.end());
  return cases;
}

std::vector<fsdp::MeshDim> dims_of(const Case& one, int ranks) {
  if (!one.has_outer) return {{"dp_shard", ranks}};
  return {{"dp_outer", 2}, {"dp_shard", ranks / 2}};
}

void expect_plan_of_runs(int ranks, bool shared_memory, const std::vector<Case>& cases, PlannedMeshOptions planned = {},
                         const PlanOptions& steps = {}) {
  run_ranks(ranks, [&](int rank) {
    if (planned.ranks_per_host != 0) fsdp::testing::pretend_hosts(rank, static_cast<int>(planned.ranks_per_host));
    planned.shared_memory = shared_memory;
    planned.rank = rank;
    std::map<bool, fsdp::DeviceMesh> meshes;
    for (auto one : cases) {
      SCOPED_TRACE(one.text + (shared_memory ? "" : ", by messages"));
      auto& mesh = meshes[one.has_outer];
      if (!mesh.defined()) mesh = fsdp::init_device_mesh("cpu", dims_of(one, ranks), {.shared_memory = shared_memory});
      one.options.units = fsdp::each<GPTBlock>();
      auto model = make_gpt();
      one.options.mesh = planned_device_mesh("cpu", dims_of(one, ranks), planned);
      const auto plan = fsdp::plan(*model, one.options, steps);
      one.options.mesh = mesh;
      const auto [memory, wire] = run<GPT>(model, one.options, gpt_loss, steps);
      expect_same(plan.memory, memory);
      expect_same(plan.wire, wire);
    }
  });
}

/// Every second case, or fewer.
std::vector<Case> part_of_cases(std::size_t first, std::size_t every = 2) {
  std::vector<Case> part;
  const auto all = all_cases();
  for (std::size_t k = first; k < all.size(); k += every) part.push_back(all[k]);
  return part;
}

TEST(Plan, IsWhatTwoRanksNeedAndSend) { expect_plan_of_runs(2, true, part_of_cases(0)); }
TEST(Plan, IsWhatFourRanksNeedAndSend) { expect_plan_of_runs(4, true, all_cases()); }
TEST(Plan, IsWhatTwoRanksNeedAndSendByMessages) { expect_plan_of_runs(2, false, all_cases()); }
TEST(Plan, IsWhatFourRanksNeedAndSendByMessages) { expect_plan_of_runs(4, false, part_of_cases(1)); }

TEST(Plan, KnowsGradientsThatAddUp) {
  expect_plan_of_runs(2, true, part_of_cases(0, 5), {}, {.microbatches = 2});
  expect_plan_of_runs(4, true, part_of_cases(1, 5), {}, {.microbatches = 3});
  expect_plan_of_runs(2, true, part_of_cases(2, 5), {}, {.microbatches = 2, .sync_each_microbatch = false});
  expect_plan_of_runs(4, true, part_of_cases(3, 5), {}, {.microbatches = 3, .sync_each_microbatch = false});
}

TEST(Plan, IsWhatRanksOfTwoHostsNeedAndSend) {
  if (!fsdp::testing::can_pretend_hosts()) GTEST_SKIP() << "this system does not let a test pretend to be on several hosts";
  std::vector<Case> cases;
  for (const auto& one : all_cases()) {
    if (one.options.offload == Offload::kNone && one.options.prefetch_depth == 1) cases.push_back(one);
  }
  expect_plan_of_runs(4, true, cases, {.ranks_per_host = 2});
}

TEST(Plan, IsWhatOneRankNeeds) { expect_plan_of_runs(1, true, {{"alone", {}}, {"alone, offloaded", {.offload = Offload::kAll}}}); }

TEST(Plan, KnowsCopiesOfNeighbours) {
  expect_plan_of_runs(4, true, {{"neighbours", {.reshard_after_forward_size = 2}}});
  expect_plan_of_runs(4, false, {{"neighbours", {.reshard_after_forward_size = 2}}});
}

TEST(Plan, KnowsReductionsWithGroupsOfTheirOwn) { expect_plan_of_runs(2, true, {{"apart", {.separate_reduce_group = true}}}); }

TEST(Plan, KnowsTiedParametersAndFrozenOnes) {
  run_ranks(2, [](int rank) {
    for (const bool freezes : {false, true}) {
      SCOPED_TRACE(freezes);
      auto model = make_gpt(/*tied=*/true);
      for (const auto& item : model->named_parameters()) {
        if (freezes && item.key().starts_with("blocks.1.")) item.value().requires_grad_(false);
      }
      FullyShardOptions options{.mesh = planned_device_mesh("cpu", {{"dp_shard", 2}}, {.rank = rank}), .units = fsdp::each<GPTBlock>()};
      const auto plan = fsdp::plan(*model, options);
      options.mesh = fsdp::testing::line();
      const auto [memory, wire] = run<GPT>(model, options, gpt_loss);
      expect_same(plan.memory, memory);
      expect_same(plan.wire, wire);
    }
  });
}

TEST(Plan, KnowsThatBackwardNeedsNoWeightsOfAFirstLinearLayer) {
  run_ranks(2, [](int rank) {
    const auto make = [] { return torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 5)); };
    auto model = make();
    FullyShardOptions options{.mesh = planned_device_mesh("cpu", {{"dp_shard", 2}}, {.rank = rank}),
                              .units = fsdp::each<torch::nn::Linear>()};
    const auto plan = fsdp::plan(*model, options);
    options.mesh = fsdp::testing::line();
    const auto [memory, wire] = run<torch::nn::Sequential>(model, options, [](auto& one) { return one->forward(at::ones({3, 6})).sum(); });
    EXPECT_EQ(plan.wire.all_gathers, 2);  // Both in forward; the last one stays for backward.
    expect_same(plan.memory, memory);
    expect_same(plan.wire, wire);
  });
}

TEST(Plan, FollowsAGivenOrder) {
  run_ranks(2, [](int rank) {
    const std::vector<std::size_t> order = {2, 0, 3, 1};
    auto model = fsdp::testing::make_stack();
    FullyShardOptions options{.mesh = planned_device_mesh("cpu", {{"dp_shard", 2}}, {.rank = rank}), .units = fsdp::testing::stack_units()};
    PlanOptions planned;
    planned.order.forward = {"(root)", "blocks.2", "blocks.0", "blocks.3", "blocks.1", "(root)"};
    planned.order.backward = {"(root)", "blocks.1", "blocks.3", "blocks.0", "blocks.2", "(root)"};
    const auto by_modules = fsdp::plan(*model, options);
    const auto plan = fsdp::plan(*model, options, planned);
    options.mesh = fsdp::testing::line();
    const auto [memory, wire] =
        run<fsdp::testing::Stack>(model, options, [&](auto& one) { return fsdp::testing::stack_loss(one, 0, rank, order); });
    expect_same(plan.memory, memory);
    expect_same(plan.wire, wire);
    EXPECT_NE(by_modules.memory.total.peak, memory.total.peak);
  });
}

TEST(Plan, ReadsNoValuesAndChangesNothing) {
  const auto mesh = planned_device_mesh("cuda", {{"dp_shard", 8}});
  const FullyShardOptions options{.mesh = mesh, .units = fsdp::each<GPTBlock>()};
  auto real = make_gpt();
  const auto of_real = fsdp::plan(*real, options).json();
  auto deferred = fsdp::deferred_init([] { return make_gpt(); });
  EXPECT_EQ(fsdp::plan(*deferred, options).json(), of_real);
  for (const auto& parameter : deferred->parameters()) EXPECT_TRUE(fsdp::is_deferred(parameter));
  fsdp::materialize(*deferred);
  for (const auto& item : real->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), deferred->named_parameters()[item.key()])) << item.key();
    EXPECT_EQ(item.value().device(), c10::Device(c10::kCPU));
    EXPECT_EQ(item.value()._version(), make_gpt()->named_parameters()[item.key()]._version());
  }
}

TEST(Plan, SaysTheKindsAtThePeakAndItsMoment) {
  auto model = make_gpt();
  const FullyShardOptions options{.mesh = planned_device_mesh("cpu", {{"dp_shard", 4}}), .units = fsdp::each<GPTBlock>()};
  const auto plan = fsdp::plan(*model, options);
  EXPECT_EQ(plan.peak.main_parameters, plan.memory.main_parameters.peak);
  EXPECT_EQ(plan.peak.optimizer_state, plan.memory.optimizer_state.peak);
  // All that comes and goes is in slots, but main gradients; on a CPU slots stay: the peak is when these are complete.
  EXPECT_EQ(plan.moment, "the end of backward");
  EXPECT_EQ(plan.peak.main_gradients, plan.memory.main_gradients.peak);
  const auto& memory = plan.memory;
  EXPECT_EQ(plan.peak.device(), memory.main_parameters.peak + memory.main_gradients.peak + memory.optimizer_state.peak + memory.slots.peak);
  EXPECT_TRUE(plan.fits(plan.peak.device()));
  EXPECT_FALSE(plan.fits(plan.peak.device() - 1));

  // Activations are largest between forward and backward.
  PlanOptions planned;
  for (const auto& unit : plan.units) planned.activations[unit.name] = std::int64_t{1} << 30;
  const auto with_activations = fsdp::plan(*model, options, planned);
  EXPECT_EQ(with_activations.peak.activations, static_cast<std::int64_t>(plan.units.size()) << 30);
  EXPECT_TRUE(with_activations.moment.starts_with("forward of ") || with_activations.moment.starts_with("backward of '(root)'"))
      << with_activations.moment;
}

TEST(Plan, CountsActivationsOfUnitsWithoutParameters) {
  torch::nn::Sequential around;  // whose root has no parameters of its own
  around->push_back(torch::nn::Linear(8, 8));
  around->push_back(torch::nn::Linear(8, 8));
  const FullyShardOptions options{.mesh = planned_device_mesh("cpu", {{"dp_shard", 4}}), .units = fsdp::each<torch::nn::LinearImpl>()};
  const auto plan = fsdp::plan(*around, options, {.activations = {{"(root)", 1 << 20}, {"1", 1 << 10}}});
  EXPECT_EQ(plan.peak.activations, (1 << 20) + (1 << 10));
}

TEST(Plan, SaysWhatEachUnitHas) {
  auto model = make_gpt();
  const auto plan = fsdp::plan(
      *model, {.mesh = planned_device_mesh("cpu", {{"dp_shard", 4}}, {.shared_memory = false}), .units = fsdp::each<GPTBlock>()});
  ASSERT_EQ(plan.units.size(), 4U);
  EXPECT_EQ(plan.units[0].name, "(root)");
  EXPECT_EQ(plan.units[3].name, "blocks.2");
  std::int64_t elements = 0, main = 0, gradients = 0, state = 0;
  for (const auto& unit : plan.units) {
    elements += unit.elements;
    main += unit.main_parameters;
    gradients += unit.main_gradients;
    state += unit.optimizer_state;
    EXPECT_EQ(unit.gathered, 4 * unit.main_parameters) << unit.name;
    EXPECT_EQ(unit.gathered, 4 * unit.elements + unit.padding) << unit.name;
    EXPECT_EQ(unit.unreduced, unit.gathered) << unit.name;
    EXPECT_EQ(unit.communication, 3 * unit.main_gradients) << unit.name;
  }
  std::int64_t expected = 0;
  for (const auto& parameter : model->parameters()) expected += parameter.numel();
  EXPECT_EQ(elements, expected);
  EXPECT_EQ(plan.elements, expected);
  EXPECT_EQ(main, plan.memory.main_parameters.peak);
  EXPECT_EQ(gradients, plan.memory.main_gradients.peak);
  EXPECT_LE(state, plan.memory.optimizer_state.peak);
}

TEST(Plan, KnowsOptimizers) {
  auto model = make_gpt();
  const FullyShardOptions options{.mesh = planned_device_mesh("cpu", {{"dp_shard", 2}}), .units = fsdp::each<GPTBlock>()};
  const auto state = [&](PlannedOptimizer optimizer) {
    return fsdp::plan(*model, options, {.optimizer = optimizer}).memory.optimizer_state.peak;
  };
  const auto main = fsdp::plan(*model, options).memory.main_parameters.peak;
  EXPECT_EQ(state(PlannedOptimizer::kNone), 0);
  EXPECT_EQ(state(PlannedOptimizer::kSGDMomentum), main);
  EXPECT_EQ(state(PlannedOptimizer::kAdamW), 2 * main);
}

TEST(Plan, IsMadeForWorldsThatAreNotThere) {
  // Llama 3 405B's sizes, except that this model's keys and values have as many heads as its queries.
  const auto model = fsdp::deferred_init(
      [] { return GPT(GPTConfig{.vocab = 128'256, .dim = 16'384, .layers = 126, .heads = 128, .hidden = 53'248, .context = 8}); },
      {.draw = false});
  const fsdp::MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16};
  const auto plan = fsdp::plan(*model, {.mesh = planned_device_mesh("cuda", {{"dp_shard", 16'384}}, {.ranks_per_host = 8}),
                                        .units = fsdp::each<GPTBlock>(),
                                        .mixed_precision = bf16});
  EXPECT_EQ(plan.ranks, 16'384);
  EXPECT_EQ(plan.units.size(), 127U);
  EXPECT_NEAR(static_cast<double>(plan.memory.main_parameters.peak), 4.0 * static_cast<double>(plan.elements) / 16'384, 2e6);
  EXPECT_GE(plan.memory.gathered_parameters.peak, 2 * 2 * std::int64_t{128'256} * 16'384);
  EXPECT_TRUE(plan.fits(std::int64_t{80} << 30));
}

TEST(Plan, IsPrintedAlikeUnderAnotherLocale) {
  const auto plan = fsdp::plan(*make_gpt(), {.mesh = planned_device_mesh("cpu", {{"dp_shard", 2}}), .units = fsdp::each<GPTBlock>()});
  const auto texts = [&] { return std::vector{plan.svg(), plan.text(), plan.json()}; };
  const auto expected = texts();
  const fsdp::testing::OtherLocale other;
  EXPECT_EQ(texts(), expected);
}

TEST(Plan, FindsTheSmallestWorld) {
  auto model = make_gpt();
  int calls = 0;
  const auto plan_for = [&](std::int64_t ranks) {
    ++calls;
    return fsdp::plan(*model, {.mesh = planned_device_mesh("cpu", {{"dp_shard", ranks}}), .units = fsdp::each<GPTBlock>()});
  };
  for (const std::int64_t step : {1, 3}) {
    for (const std::int64_t ranks : {1, 2, 4, 8}) {
      const auto bytes = plan_for(ranks * step).peak.device();
      const auto found = fsdp::smallest_world(plan_for, bytes, step, 200);
      ASSERT_TRUE(found);
      EXPECT_TRUE(found->fits(bytes));
      EXPECT_EQ(found->ranks % step, 0);
      EXPECT_LE(found->ranks, ranks * step);
      EXPECT_TRUE(found->ranks == step || !plan_for(found->ranks - step).fits(bytes));
    }
  }
  calls = 0;
  EXPECT_FALSE(fsdp::smallest_world(plan_for, 1000, 1, 100));
  EXPECT_FALSE(fsdp::smallest_world(plan_for, 1000, 3, 100));  // which 3 does not divide
  EXPECT_LE(calls, 16);
}

TEST(Plan, FindsTheSmallestOfAllWorlds) {
  for (const std::int64_t layers : {1, 2}) {
    for (const std::int64_t dim : {4, 12}) {
      torch::manual_seed(5);
      GPT model(GPTConfig{.vocab = 13, .dim = dim, .layers = layers, .heads = 2, .hidden = 2 * dim + 1, .context = 4});
      std::map<std::int64_t, Plan> plans;
      const auto plan_for = [&](std::int64_t ranks) {
        const auto known = plans.find(ranks);
        if (known != plans.end()) return known->second;
        const auto mesh = planned_device_mesh("cpu", {{"dp_shard", ranks}});
        return plans.emplace(ranks, fsdp::plan(*model, {.mesh = mesh, .units = fsdp::each<GPTBlock>()})).first->second;
      };
      constexpr std::int64_t kWorlds = 40;
      std::vector<std::int64_t> needed;
      for (std::int64_t ranks = 1; ranks <= kWorlds; ++ranks) needed.push_back(plan_for(ranks).peak.device());
      EXPECT_FALSE(std::ranges::is_sorted(needed, std::greater())) << "padding counts in none of them";
      for (const auto bytes : needed) {
        const auto first = std::ranges::find_if(needed, [&](auto needs) { return needs <= bytes; }) - needed.begin() + 1;
        const auto found = fsdp::smallest_world(plan_for, bytes, 1, kWorlds);
        ASSERT_TRUE(found);
        EXPECT_EQ(found->ranks, first) << bytes << " bytes";
      }
      const auto least = *std::ranges::min_element(needed);
      EXPECT_FALSE(fsdp::smallest_world(plan_for, least - 1, 1, kWorlds)) << least;
    }
  }
}

TEST(Plan, TellsTheMomentsOfAStep) {
  auto model = make_gpt();
  const auto plan = fsdp::plan(*model, {.mesh = planned_device_mesh("cpu", {{"dp_shard", 4}}), .units = fsdp::each<GPTBlock>()},
                               {.activations = {{"blocks.1", 1'000'000}}});
  std::vector<std::string> names;
  std::int64_t most = 0;
  for (const auto& moment : plan.moments) {
    names.push_back(moment.what);
    most = std::max(most, moment.most.device());
  }
  EXPECT_EQ(most, plan.peak.device());
  const auto place = [&](const std::string& name) { return std::ranges::find(names, name) - names.begin(); };
  EXPECT_EQ(place("the beginning of a step"), 0);
  EXPECT_LT(place("forward of 'blocks.0'"), place("forward of 'blocks.2'"));
  EXPECT_LT(place("forward of 'blocks.2'"), place("backward of 'blocks.2'"));
  EXPECT_LT(place("backward of 'blocks.2'"), place("backward of 'blocks.0'"));
  EXPECT_EQ(names.back(), "the update");
  const auto activations = [&](const std::string& name) { return plan.moments[static_cast<std::size_t>(place(name))].most.activations; };
  EXPECT_EQ(activations("forward of 'blocks.0'"), 0);
  EXPECT_EQ(activations("forward of 'blocks.2'"), 1'000'000);
  EXPECT_EQ(activations("backward of 'blocks.0'"), 0);
}

TEST(Plan, IsATableAndJson) {
  auto model = make_gpt();
  const auto plan =
      fsdp::plan(*model, {.mesh = planned_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", 4}}), .units = fsdp::each<GPTBlock>()});
  const auto text = plan.text();
  for (const char* part : {"8 ranks", "4 units", "the end of backward", "main parameters", "gathered parameters",
                           "blocks.0 to blocks.2 (3, each)", "dp_outer", "dp_shard"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  const auto json = nlohmann::json::parse(plan.json());
  EXPECT_EQ(json["peak"]["device"].get<std::int64_t>(), plan.peak.device());
  EXPECT_EQ(json["memory"]["total"]["peak"].get<std::int64_t>(), plan.memory.total.peak);
  EXPECT_EQ(json["units"].size(), 4U);
  EXPECT_EQ(json["links"].size(), 2U);
  std::int64_t sent = 0;
  for (const auto& link : json["links"]) sent += link["sent"]["all_gather_bytes"].get<std::int64_t>();
  EXPECT_EQ(sent, plan.wire.all_gather_bytes);
}

TEST(Plan, RefusesWhatItCanNotPlan) {
  auto model = make_gpt();
  const auto says = [](const std::string& text, const std::function<void()>& call) {
    EXPECT_NE(message_of(call).find(text), std::string::npos) << message_of(call);
  };
  says("planned_device_mesh()", [&] { fsdp::plan(*model, {}); });
  says("planned_device_mesh()", [&] { fsdp::plan(*model, {.mesh = fsdp::null_device_mesh({{"dp_shard", 2}})}); });
  const auto mesh = planned_device_mesh("cpu", {{"dp_shard", 2}});
  says("unit 'blocks.9'", [&] {
    PlanOptions planned;
    planned.order.forward = {"blocks.9"};
    fsdp::plan(*model, {.mesh = mesh}, planned);
  });
  says("unit 'blocks.9'", [&] { fsdp::plan(*model, {.mesh = mesh}, {.activations = {{"blocks.9", 1}}}); });
  says("prefetch_depth -1", [&] { fsdp::plan(*model, {.mesh = mesh, .prefetch_depth = -1}); });
  says("device type 'tpu'", [&] { planned_device_mesh("tpu", {{"dp_shard", 2}}); });
  says("planned_device_mesh: dimension 'dp_shard' has -1 ranks", [&] { planned_device_mesh("cpu", {{"dp_shard", -1}}); });
  says("planned_device_mesh: there is no rank 2 of 2", [&] { planned_device_mesh("cpu", {{"dp_shard", 2}}, {.rank = 2}); });
  says("microbatches 0; give 1 or more", [&] { fsdp::plan(*model, {.mesh = mesh}, {.microbatches = 0}); });
}

}  // namespace plan_test
