// Modules that not all ranks use: attend().

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/random_model.h"
#include "support/recording_communicator.h"
#include "support/reference.h"
#include "support/shardings.h"

namespace attend_test {

using fsdp::attend;
using fsdp::DeviceMesh;
using fsdp::FullyShardOptions;
using fsdp::testing::all_strategies;
using fsdp::testing::Checkpoint;
using fsdp::testing::expect_same;
using fsdp::testing::has;
using fsdp::testing::line;
using fsdp::testing::Log;
using fsdp::testing::message_of;
using fsdp::testing::NamedTensors;
using fsdp::testing::plane;
using fsdp::testing::recorded;
using fsdp::testing::run_ranks;
using fsdp::testing::Sharding;
using fsdp::testing::shardings;

constexpr std::int64_t kWidth = 6;
constexpr int kParts = 4;  ///< Two experts in each of two layers.

using Linear = torch::nn::Linear;

/// A block that is a unit, with a unit inside.
struct ExpertImpl : torch::nn::Module {
  ExpertImpl() : inner(register_module("inner", Linear(kWidth, kWidth))), scale(register_parameter("scale", torch::randn({kWidth}))) {}
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(inner(x)) * scale; }
  Linear inner;
  at::Tensor scale;
};
TORCH_MODULE(Expert);

/// What a rank without data for a module does.
enum class Absent {
  kAttends,  ///< Skips it, after attend().
  kRuns,     ///< Runs it on zeros, so that its gradients are zero: what programs do without attend().
};

enum class Recompute {
  kNothing,
  kLayers,           ///< By activation_checkpoint.
  kLayersReentrant,  ///< By checkpoints that compute without grad mode first, and then in a backward inside of the backward.
};

struct Microbatch {
  std::int64_t number;
  std::vector<bool> uses;       ///< For each expert, whether this rank has data for it.
  std::vector<bool> used_ever;  ///< Whether any rank has.
  Recompute recompute = Recompute::kNothing;
};

struct LayerImpl : torch::nn::Module {
  LayerImpl() : first(register_module("first", Linear(kWidth, kWidth))) {
    for (int k = 0; k < 2; ++k) experts.push_back(register_module("expert" + std::to_string(k), Expert()));
  }
  at::Tensor forward(const at::Tensor& input, std::size_t layer, const Microbatch& batch, Absent absent) {
    auto x = torch::tanh(first(input));
    auto sum = x;
    for (std::size_t k = 0; k < 2; ++k) {
      const auto part = 2 * layer + k;
      const bool uses = batch.uses[part];
      if (absent == Absent::kAttends) attend(*experts[k], uses);
      if (uses) {
        sum = sum + experts[k](x.narrow(0, static_cast<std::int64_t>(k), 2)).mean();
      } else if (absent == Absent::kRuns && batch.used_ever[part]) {
        sum = sum + experts[k](x.narrow(0, 0, 2) * 0).mean() * 0;
      }
    }
    return sum;
  }
  Linear first;
  std::vector<Expert> experts;
};
TORCH_MODULE(Layer);

struct MixtureImpl : torch::nn::Module {
  MixtureImpl() : stem(register_module("stem", Linear(kWidth, kWidth))), head(register_module("head", Linear(kWidth, 3))) {
    for (int k = 0; k < 2; ++k) layers.push_back(register_module("layer" + std::to_string(k), Layer()));
  }
  at::Tensor forward(at::Tensor x, const Microbatch& batch, Absent absent) {
    x = stem(x);
    for (std::size_t k = 0; k < 2; ++k) {
      const auto run = [layer = layers[k].ptr(), k, batch, absent](const at::Tensor& input) {
        return layer->forward(input, k, batch, absent);
      };
      if (batch.recompute == Recompute::kLayersReentrant) {
        x = Checkpoint::apply(x, c10::make_intrusive<Checkpoint::Call>(run));
      } else {
        x = batch.recompute == Recompute::kLayers ? fsdp::activation_checkpoint(run, x) : run(x);
      }
    }
    return head(x);
  }
  Linear stem;
  std::vector<Layer> layers;
  Linear head;
};
TORCH_MODULE(Mixture);

fsdp::UnitPredicate units() { return fsdp::each<Linear, Expert, Layer>(); }

Mixture make_model() {
  torch::manual_seed(11);
  return Mixture();
}

/// Which ranks use which part: in the first passes certain sets, then random ones.
bool uses(std::int64_t pass, int rank, int ranks, int part) {
  const bool last = rank == ranks - 1;
  switch ((pass + part) % 6) {
    case 0:
      return !last;
    case 1:
      return last;
    case 2:
      return false;
    case 3:
      return true;
    default:
      break;
  }
  const auto mixed = static_cast<std::uint64_t>(pass * 31 + rank * 7 + part + 1) * 0x9e3779b97f4a7c15ULL;
  return (mixed >> 60 & 1) != 0;
}

/// `row`: ranks that are apart by as many use the same parts.
Microbatch microbatch(std::int64_t number, int rank, int row, Recompute recompute) {
  Microbatch batch{.number = number, .uses = {}, .used_ever = {}, .recompute = recompute};
  for (int part = 0; part < kParts; ++part) {
    batch.uses.push_back(uses(number, rank % row, row, part));
    bool ever = false;
    for (int r = 0; r < row; ++r) ever = ever || uses(number, r, row, part);
    batch.used_ever.push_back(ever);
  }
  return batch;
}

at::Tensor loss_of(Mixture& model, const Microbatch& batch, int rank, Absent absent, at::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 * batch.number + rank));
  const auto x = at::randn({4, kWidth}, generator).to(dtype);
  return model(x, batch, absent).to(at::kFloat).square().mean();
}

struct How {
  Recompute recompute = Recompute::kNothing;
  bool accumulates = false;  ///< Two microbatches for each step; the first is not synchronized.
  bool together = false;     ///< Both forwards before both backwards.
};

NamedTensors train(const FullyShardOptions& options, Absent absent, int rank, int row, const How& how, at::ScalarType dtype) {
  auto model = make_model();
  auto sharded = fsdp::fully_shard(*model, options);
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});
  const int each = how.accumulates ? 2 : 1;
  NamedTensors all;
  for (int step = 0; step < 6; ++step) {
    std::vector<at::Tensor> losses;
    const auto forward = [&](int k) {
      losses.push_back(loss_of(model, microbatch(each * step + k, rank, row, how.recompute), rank, absent, dtype));
    };
    const auto backward = [&](int k) {
      sharded.set_requires_gradient_sync(k == each - 1);
      losses[static_cast<std::size_t>(k)].backward();
    };
    for (int k = 0; k < each; ++k) {
      forward(k);
      if (!how.together) backward(k);
    }
    for (int k = 0; how.together && k < each; ++k) backward(k);
    EXPECT_EQ(sharded.memory_stats().unreduced_gradients.live, 0);
    EXPECT_EQ(sharded.memory_stats().communication.live, 0);
    for (const auto& [name, gradient] : sharded.full_gradients()) all.emplace_back(name + " gradient", gradient);
    optimizer.step();
    optimizer.zero_grad();
    {  // Evaluation.
      const torch::NoGradGuard no_grad;
      all.emplace_back("loss", loss_of(model, microbatch(step + 3, rank, row, Recompute::kNothing), rank, absent, dtype));
    }
  }
  for (auto& [name, parameter] : sharded.full_parameters()) all.emplace_back(name, parameter);
  return all;
}

void expect_equal_to_zeros(const Sharding& sharding, int rank, int ranks, const How& how) {
  // A unit on a mesh of its own has a gradient where a rank of that mesh has data for it: so that the other ranks need not run it on zeros,
  // both meshes have it alike.
  const int row = sharding.options.unit_settings ? ranks / 2 : ranks;
  const auto expected = train(sharding.options, Absent::kRuns, rank, row, how, sharding.compute);
  const auto actual = train(sharding.options, Absent::kAttends, rank, row, how, sharding.compute);
  expect_same(actual, expected, 0, sharding.name);
}

struct Row {
  int ranks;
  bool shared_memory;
};

std::string name_of(const ::testing::TestParamInfo<Row>& info) {
  return std::to_string(info.param.ranks) + (info.param.shared_memory ? "OverSharedMemory" : "OverMessages");
}

class Attend : public ::testing::TestWithParam<Row> {};

// [Attendance is agreed] The bits of a pass whose gradients are zero, whichever ranks are absent.
TEST_P(Attend, GivesTheBitsOfAPassOnZeros) {
  const auto [ranks, shared_memory] = GetParam();
  if (!shared_memory) setenv("FSDP_SHARED_MEMORY", "0", 1);
  run_ranks(ranks, [ranks = ranks, shared_memory = shared_memory](int rank) {
    std::vector<Sharding> all;
    if (ranks == 4 && shared_memory) {  // what moves the bytes does not depend on where main parameters are
      all = shardings(units(), "layer1.expert0");
    } else {
      for (const auto& strategy : all_strategies()) {
        all.push_back(
            {.name = strategy, .options = {.mesh = line(), .units = units(), .placements = fsdp::Placements::from_name(strategy)}});
      }
    }
    for (const auto& sharding : all) {
      SCOPED_TRACE(sharding.name);
      expect_equal_to_zeros(sharding, rank, ranks, {});
    }
  });
  unsetenv("FSDP_SHARED_MEMORY");
}

// What else a step may do.
TEST_P(Attend, GivesTheBitsOfAPassOnZerosInOtherSteps) {
  const auto [ranks, shared_memory] = GetParam();
  if (!shared_memory) setenv("FSDP_SHARED_MEMORY", "0", 1);
  run_ranks(ranks, [ranks = ranks, shared_memory = shared_memory](int rank) {
    const fsdp::MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16};
    const auto mesh = line();
    std::vector<Sharding> all = {
        {.name = "kept", .options = {.mesh = mesh, .units = units(), .reshard_after_forward = false}},
        {.name = "bf16", .options = {.mesh = mesh, .units = units(), .mixed_precision = bf16}, .compute = at::kBFloat16},
        {.name = "no read-ahead", .options = {.mesh = mesh, .units = units(), .prefetch_depth = 0}},
        {.name = "far read-ahead", .options = {.mesh = mesh, .units = units(), .prefetch_depth = 3}},
        {.name = "kept bytes", .options = {.mesh = mesh, .units = units(), .keep_gathered_bytes = 400}},
        {.name = "two groups", .options = {.mesh = mesh, .units = units(), .separate_reduce_group = true}},
    };
    if (ranks % 2 == 0) all.push_back({.name = "HSDP", .options = {.mesh = plane(), .units = units()}});
    if (!shared_memory) all.resize(2);
    for (const auto& sharding : all) {
      for (const How& how : {How{.recompute = Recompute::kLayers}, How{.recompute = Recompute::kLayersReentrant}, How{.accumulates = true},
                             How{.accumulates = true, .together = true}}) {
        SCOPED_TRACE(sharding.name + (how.accumulates                       ? how.together ? ", together" : ", accumulation"
                                      : how.recompute == Recompute::kLayers ? ", checkpoints"
                                                                            : ", reentrant checkpoints"));
        expect_equal_to_zeros(sharding, rank, ranks, how);
      }
    }
  });
  unsetenv("FSDP_SHARED_MEMORY");
}

INSTANTIATE_TEST_SUITE_P(Rows, Attend,
                         ::testing::Values(Row{2, true}, Row{3, true}, Row{4, true}, Row{2, false}, Row{3, false}, Row{4, false}), name_of);

/// A trunk, and a part that some ranks skip. On 2 and 4 ranks, shards have no padding.
struct PartsImpl : torch::nn::Module {
  PartsImpl()
      : trunk(register_module("trunk", Linear(torch::nn::LinearOptions(8, 32).bias(false)))),
        part(register_module("part", Linear(torch::nn::LinearOptions(32, 32).bias(false)))) {}
  at::Tensor forward(const at::Tensor& x) { return trunk(x).sum(); }
  at::Tensor with_part(const at::Tensor& x) {
    const auto y = trunk(x);
    return y.sum() + part(y).sum();
  }
  Linear trunk, part;
};
TORCH_MODULE(Parts);

constexpr std::int64_t kTrunkBytes = 4 * 8 * 32;
constexpr std::int64_t kPartBytes = 4 * 32 * 32;

Parts make_parts() {
  torch::manual_seed(2);
  return Parts();
}

// [Attendance is agreed] Absent ranks give their shards without receiving, and hold nothing of the unit but what a reduction receives.
TEST_P(Attend, AbsentRanksNeitherReceiveNorHoldTheUnit) {
  const auto [ranks, shared_memory] = GetParam();
  run_ranks(ranks, [ranks = ranks, shared_memory = shared_memory](int rank) {
    auto model = make_parts();
    const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = shared_memory});
    auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<Linear>()});
    const bool absent = rank > 0;
    attend(*model->part, !absent);
    const auto x = torch::ones({2, 8});
    (absent ? model(x) : model->with_part(x)).backward();
    const auto stats = sharded.memory_stats();
    if (ranks == 3) return;  // Shards have padding.
    EXPECT_EQ(stats.gathered_parameters.peak, absent ? kTrunkBytes : kTrunkBytes + kPartBytes);
    EXPECT_EQ(stats.gathered_parameters.live, 0);
    EXPECT_EQ(stats.unreduced_gradients.peak >= kPartBytes, !absent);
    // A message for each part that another rank gives or receives; the trunk's shards go to all.
    const auto others = ranks - 1;
    const auto part = kPartBytes / ranks, trunk = kTrunkBytes / ranks;
    const auto wire = sharded.wire_stats();
    EXPECT_EQ(wire.all_gather_bytes, others * trunk + (absent ? part : 0));
    EXPECT_EQ(wire.reduce_scatter_bytes, others * trunk + (absent ? 0 : others * part));
    EXPECT_LE(stats.communication.peak, shared_memory ? 0 : others * (part + trunk));
  });
}

/// Evaluates with the part on the ranks that are present.
void evaluate(Parts& model, bool present) {
  const torch::NoGradGuard no_grad;
  const auto y = model->trunk(torch::ones({2, 8}));
  attend(*model->part, present);
  if (present) model->part(y);
}

// What some ranks hold, after an evaluation or for a backward, the others get by unshard(), and the backward gives what it gives without.
TEST(AttendUnshard, GathersWhatOnlySomeRanksHold) {
  run_ranks(3, [](int rank) {
    std::vector<NamedTensors> gradients;
    for (const bool unshards : {false, true}) {
      auto model = make_parts();
      const auto expected = model->part->weight.detach().clone();
      auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = fsdp::each<Linear>()});
      const auto unshard = [&] {
        if (!unshards) return;
        fsdp::handle(*model->part).unshard();
        EXPECT_TRUE(at::equal(model->part->weight.detach(), expected));
      };
      evaluate(model, rank == 1);
      unshard();
      for (const int present : {0, 2}) {
        sharded.set_is_last_backward(present == 2);
        attend(*model->part, rank == present);
        const auto loss = rank == present ? model->with_part(torch::ones({2, 8})) : model(torch::ones({2, 8}));
        unshard();
        loss.backward();
      }
      unshard();
      gradients.push_back(sharded.full_gradients());
    }
    expect_same(gradients[1], gradients[0], 0, "gradients");
  });
}

// What operators have written on all ranks, a rank gets that was absent when the others first used it.
TEST(AttendWrites, ReachRanksThatWereAbsent) {
  run_ranks(4, [](int rank) {
    FullyShardOptions hfsdp{.mesh = plane(), .units = fsdp::each<Linear>()};
    hfsdp.outer_placements = fsdp::Placements::optim();
    for (const auto& options : {FullyShardOptions{.mesh = line(), .units = fsdp::each<Linear>()}, hfsdp}) {
      auto model = make_parts();
      const at::Tensor expected = 0.5 * model->part->weight.detach();
      auto sharded = fsdp::fully_shard(*model, options);
      {
        const torch::NoGradGuard no_grad;
        at::Tensor(model->part->weight).mul_(0.5);
      }
      attend(*model->part, rank == 0);
      const auto loss = rank == 0 ? model->with_part(torch::ones({2, 8})) : model(torch::ones({2, 8}));
      attend(*model->part, rank == 3);
      if (rank == 3) {
        EXPECT_TRUE(at::equal(model->part->weight.detach(), expected));
      }
      loss.backward();
      expect_same({{"part", sharded.full_parameters()[1].second}}, {{"part", expected}}, 0, "written");
    }
  });
}

// A unit that no rank uses is not gathered, also if all have used it before, and has no gradient, so that optimizers skip it.
TEST(AttendByNone, MovesNothing) {
  const auto log = std::make_shared<Log>();
  auto model = make_parts();
  const auto mesh = recorded(fsdp::null_device_mesh({{"dp_shard", 4}}), log);
  auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<Linear>()});
  const auto x = torch::ones({2, 8});
  for (int step = 0; step < 2; ++step) {
    attend(*model->part, true);
    model->with_part(x).backward();
    sharded.zero_grad();
  }
  for (int step = 0; step < 2; ++step) {
    log->clear();
    attend(*model->part, false);
    model(x).backward();
    for (const auto& event : *log) EXPECT_FALSE(has(event, "part")) << event;
    EXPECT_GT(std::count(log->begin(), log->end(), std::string("exchange")), 0);
    for (const auto& shard : sharded.gradient_shards()) EXPECT_EQ(shard.value.defined(), !has(shard.name, "part")) << shard.name;
    sharded.zero_grad();
  }
}

// A unit that all ranks use is gathered ahead, left and gathered again as any other.
TEST(AttendByAll, IsAsAnyOtherUnit) {
  const auto log = std::make_shared<Log>();
  Log first;
  for (const bool attends : {false, true}) {
    auto model = make_parts();
    const auto mesh = recorded(fsdp::null_device_mesh({{"dp_shard", 4}}), log);
    auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<Linear>()});
    for (int step = 0; step < 3; ++step) {
      log->clear();
      if (attends) attend(*model->part, true);
      model->with_part(torch::ones({2, 8})).backward();
      sharded.zero_grad();
    }
    std::erase_if(*log, [](const auto& event) { return event == "exchange" || has(event, "reduce part"); });  // the end of backward
    if (!attends) first = *log;
  }
  EXPECT_EQ(*log, first);
  EXPECT_GT(std::count(first.begin(), first.end(), std::string("gather part")), 0);
}

TEST(AttendErrors, NameTheWayOut) {
  auto plain = make_parts();
  EXPECT_TRUE(has(message_of([&] { attend(*plain->part, true); }), "contains no unit"));
  auto model = make_parts();
  auto sharded = fsdp::fully_shard(*model, {.mesh = fsdp::null_device_mesh({{"dp_shard", 4}})});
  EXPECT_TRUE(has(message_of([&] { attend(*model->part, true); }), "contains no unit"));
  attend(*model, true);
  sharded.set_gradient_divide_factor(3);
  EXPECT_TRUE(has(message_of([&] { attend(*model, true, {.divide_by_present = true}); }), "set_gradient_divide_factor's 3.0"));
}

// The sum is divided by the number of ranks that were present in any forward since the last reduction.
TEST(AttendDivides, ByTheRanksThatWerePresent) {
  run_ranks(4, [](int rank) {
    std::vector<NamedTensors> gradients;
    for (const bool divides : {true, false}) {
      auto model = make_parts();
      auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = fsdp::each<Linear>()});
      if (!divides) fsdp::handle(*model->part).set_gradient_divide_factor(3);
      for (const int present : {1, 3}) {
        attend(*model->part, rank == present || rank == 0, {.divide_by_present = divides});
        const auto x = torch::full({2, 8}, 1.0 + rank);
        sharded.set_requires_gradient_sync(present == 3);
        (rank == present || rank == 0 ? model->with_part(x) : model(x)).backward();
      }
      gradients.push_back(sharded.full_gradients());
    }
    expect_same(gradients[0], gradients[1], 0, "gradients");
    // All ranks have to divide alike.
    auto model = make_parts();
    fsdp::fully_shard(*model, {.mesh = line(), .units = fsdp::each<Linear>()});
    const auto message = message_of([&] { attend(*model->part, true, {.divide_by_present = rank == 0}); });
    EXPECT_TRUE(has(message, "of the 4 ranks of unit 'part', 1 divide")) << message;
  });
}

/// Two heads, whose reductions begin one after the other, behind a part that some ranks skip.
struct HeadsImpl : torch::nn::Module {
  HeadsImpl() {
    for (const char* name : {"trunk", "part", "first", "second"}) layers.push_back(register_module(name, Linear(kWidth, kWidth)));
  }
  at::Tensor forward(at::Tensor x, bool uses_part) {
    for (std::size_t k = 0; k < layers.size(); ++k) {
      if (k != 1 || uses_part) x = torch::tanh(layers[k](x));
    }
    return x.sum();
  }
  std::vector<Linear> layers;
};
TORCH_MODULE(Heads);

// All ranks of the model have to move alike, also those on which a unit has other ranks, none of which uses it.
TEST(AttendOnOtherMeshes, MovesAllRanksAlike) {
  run_ranks(4, [](int rank) {
    const bool present = rank < 2;
    torch::manual_seed(6);
    Heads whole;
    for (int r = 0; r < 4; ++r) (whole(torch::full({2, kWidth}, 0.1 * (1 + r)), r < 2) / 4).backward();
    torch::manual_seed(6);
    Heads model;
    const auto mesh = plane();
    FullyShardOptions options{.mesh = mesh, .units = fsdp::each<Linear>()};
    options.unit_settings = [&](const std::string& name, const torch::nn::Module&) {
      return fsdp::UnitSettings{.mesh = name == "part" ? mesh["dp_shard"] : DeviceMesh()};
    };
    auto sharded = fsdp::fully_shard(*model, options);
    for (int step = 0; step < 3; ++step) {
      sharded.zero_grad();
      attend(*model->layers[1], present);
      model(torch::full({2, kWidth}, 0.1 * (1 + rank)), present).backward();
    }
    const auto expected = whole->named_parameters();
    for (const auto& [name, gradient] : sharded.full_gradients()) {
      const bool of_part = has(name, "part");
      ASSERT_EQ(gradient.defined(), present || !of_part) << name;
      if (!of_part) {
        EXPECT_TRUE(torch::allclose(gradient, expected[name].grad())) << name;
      }
    }
  });
}

}  // namespace attend_test
