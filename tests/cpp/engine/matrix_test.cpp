// Every sharding strategy in every precision with every way to accumulate gradients, against the same training unsharded in one process
// without the library: parameters, gradients and losses bit for bit, and the bytes that travel and that live.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "memory/slot_pool.h"
#include "support/exact_arithmetic.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/unkind_communicator.h"

namespace matrix_test {

using fsdp::Offload;
using fsdp::Placements;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::Stack;
using fsdp::testing::stack_input;
using fsdp::testing::stack_units;
using fsdp::testing::sum_in_pairs;

constexpr std::int64_t kFormatBlock = 32;

struct Strategy {
  std::string name;
  Placements placements;
  bool two_dimensions = false;
  Placements outer = Placements::no_shard();
};

std::vector<Strategy> strategies() {
  return {{"no_shard", Placements::no_shard()},
          {"optim", Placements::optim()},
          {"optim_grads", Placements::optim_grads()},
          {"optim_grads_params", Placements::optim_grads_params()},
          {"HSDP", Placements::optim_grads_params(), true},
          {"HSDP of replicas", Placements::no_shard(), true},
          {"HSDP of optim", Placements::optim(), true},
          {"HFSDP", Placements::optim_grads_params(), true, Placements::optim()}};
}

struct Row {
  Strategy strategy;
  bool checkpoint = false;
  Offload offload = Offload::kNone;
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const auto& strategy : strategies()) {
    for (const bool checkpoint : {false, true}) {
      for (const auto offload : {Offload::kNone, Offload::kAll}) all.push_back({strategy, checkpoint, offload});
    }
    all.push_back({strategy, false, Offload::kOptimizerState});
  }
  return all;
}

struct Precision {
  std::string name;
  at::ScalarType compute = at::kFloat;
  at::ScalarType wire = at::kFloat;
  bool float8_gather = false;
  bool policy = true;
  bool int4_gather = false;
  bool hadamard = false;  ///< With int4_gather.

  bool in_format() const { return float8_gather || int4_gather; }
  /// Errors of differences could add up.
  int steps() const { return int4_gather ? 4 : 2; }
  std::shared_ptr<const fsdp::GatherFormat> format() const {
    return std::make_shared<const fsdp::GatherFormat>(float8_gather ? fsdp::float8_blocks(kFormatBlock)
                                                                    : fsdp::int4_differences({kFormatBlock, hadamard}));
  }
};

struct Accumulation {
  std::string name;
  int backwards = 1;
  bool sync = true;  ///< At each backward, or at the last only.
};

const std::vector<Accumulation> kAccumulations = {{"one backward"}, {"three, each reduced", 3, true}, {"three, reduced once", 3, false}};

/// As many ranks as there are, or in rows of half of them.
std::int64_t outer_size(const Strategy& strategy, int ranks) { return strategy.two_dimensions && ranks > 1 ? 2 : 1; }

// The reference. It shares no code with the library.

at::Tensor loss_of(Stack& model, at::ScalarType dtype, int step, int backward, int rank) {
  return model->forward(stack_input(10 * step + backward, rank).to(dtype)).square().mean();
}

struct Outcome {
  std::vector<std::vector<float>> losses;  ///< [step * backwards + backward][rank]
  std::vector<at::Tensor> gradients;       ///< Of the last step.
  std::vector<at::Tensor> parameters;
};

/// `rows`: the gradients of so many consecutive ranks are summed and travel once more, rounded to the wire's dtype, to be summed with those
/// of other rows.
Outcome train_reference(const Precision& precision, const Accumulation& accumulation, int ranks, int row) {
  auto model = make_stack();
  model->to(precision.compute);
  std::vector<at::Tensor> main;
  for (const auto& parameter : make_stack()->parameters()) main.push_back(parameter.detach().clone());
  std::vector<at::Tensor> exp_avgs;
  std::vector<at::Tensor> exp_avg_sqs;
  for (const auto& parameter : main) {
    exp_avgs.push_back(torch::zeros_like(parameter));
    exp_avg_sqs.push_back(torch::zeros_like(parameter));
  }
  std::vector<fsdp::testing::Int4Receiver> received;
  for (const auto& parameter : main) received.emplace_back(parameter, precision.compute, kFormatBlock, precision.hadamard);
  Outcome outcome;
  for (int step = 0; step < precision.steps(); ++step) {
    {
      const torch::NoGradGuard no_grad;
      const auto parameters = model->parameters();
      for (std::size_t i = 0; i < main.size(); ++i) {
        if (precision.int4_gather && step > 0) received[i].receive(main[i]);
        parameters[i].copy_(precision.int4_gather     ? received[i].values()
                            : precision.float8_gather ? fsdp::testing::through_float8(main[i], kFormatBlock)
                                                      : main[i]);
      }
    }
    std::vector<at::Tensor> reduced(main.size());
    std::vector<std::vector<at::Tensor>> local(static_cast<std::size_t>(ranks));
    for (int backward = 0; backward < accumulation.backwards; ++backward) {
      auto& losses = outcome.losses.emplace_back();
      for (int rank = 0; rank < ranks; ++rank) {
        model->zero_grad();
        const auto loss = loss_of(model, precision.compute, step, backward, rank);
        loss.backward();
        losses.push_back(loss.item<float>());
        auto& mine = local[static_cast<std::size_t>(rank)];
        mine.resize(main.size());
        const auto parameters = model->parameters();
        for (std::size_t i = 0; i < main.size(); ++i) {
          const auto gradient = parameters[i].grad().to(at::kFloat);
          mine[i] = mine[i].defined() ? mine[i] + gradient : gradient.clone();
        }
      }
      if (!accumulation.sync && backward + 1 < accumulation.backwards) continue;
      for (std::size_t i = 0; i < main.size(); ++i) {
        std::vector<at::Tensor> rows;
        for (int first = 0; first < ranks; first += row) {
          std::vector<at::Tensor> terms;
          for (int rank = first; rank < first + row; ++rank) {
            terms.push_back(local[static_cast<std::size_t>(rank)][i].to(precision.wire).to(at::kFloat));
          }
          rows.push_back(sum_in_pairs(terms) * (1.0F / static_cast<float>(ranks)));
        }
        if (rows.size() > 1) {
          for (auto& sum : rows) sum = sum.to(precision.wire).to(at::kFloat);
        }
        const auto sum = sum_in_pairs(rows);
        reduced[i] = reduced[i].defined() ? reduced[i] + sum : sum;
      }
      for (auto& mine : local) mine.clear();
    }
    for (std::size_t i = 0; i < main.size(); ++i) {
      const auto count = torch::full({}, static_cast<float>(step + 1));
      at::_fused_adamw_({main[i]}, {reduced[i]}, {exp_avgs[i]}, {exp_avg_sqs[i]}, {}, {count}, 1e-2, 0.9, 0.999, 0.1, 1e-8, false, false);
    }
    outcome.gradients = reduced;
  }
  outcome.parameters = main;
  return outcome;
}

// What should travel and live, from shapes and the documented layout.

/// Of each unit, the elements of one of `ranks` equal parts. Parameters begin, and parts end, at multiples of 64 bytes in the narrowest
/// dtype, and of the gather's blocks.
std::vector<std::int64_t> pieces_of(const Precision& precision, int ranks) {
  std::int64_t alignment = 16;
  if (precision.compute == at::kBFloat16 || precision.wire == at::kBFloat16) alignment = 32;
  if (precision.in_format()) alignment = kFormatBlock;
  const auto up = [&](std::int64_t n) { return (n + alignment - 1) / alignment * alignment; };
  std::map<std::string, std::int64_t> ends;  // The root's name sorts first, then blocks by number.
  for (const auto& item : make_stack()->named_parameters()) {
    const auto unit = item.key().starts_with("blocks.") ? item.key().substr(0, 8) : std::string();
    ends[unit] = up(ends[unit]) + item.value().numel();
  }
  std::vector<std::int64_t> units;
  for (const auto& [name, end] : ends) units.push_back(up((end + ranks - 1) / ranks));
  return units;
}

struct Bytes {
  std::int64_t all_gather = 0;
  std::int64_t reduce_scatter = 0;
  std::int64_t main_parameters = 0;
  std::int64_t main_gradients = 0;
  std::int64_t gathered_peak = 0;
  std::int64_t host = 0;  ///< After the first update.
};

Bytes expected_bytes(const Row& row, const Precision& precision, const Accumulation& accumulation, int ranks) {
  const auto& strategy = row.strategy;
  const bool on_host = row.offload == Offload::kAll;
  const auto units = pieces_of(precision, ranks);
  const auto itemsize = [](at::ScalarType dtype) { return static_cast<std::int64_t>(c10::elementSize(dtype)); };
  const std::int64_t outer = outer_size(strategy, ranks);
  const std::int64_t inner = ranks / outer;
  const int steps = precision.steps();
  const auto travelling = [&](std::int64_t elements) {
    return precision.float8_gather ? elements / kFormatBlock * (kFormatBlock + 1) : elements * itemsize(precision.compute);
  };
  const bool sharded_parameters = strategy.placements == Placements::optim_grads_params();
  const bool sharded_optimizer = strategy.placements != Placements::no_shard();
  const bool sharded_gradients = sharded_parameters || strategy.placements == Placements::optim_grads();
  const bool hfsdp = strategy.outer == Placements::optim() && outer > 1;
  const bool separate = precision.compute != at::kFloat || precision.in_format() || on_host;
  const bool alone = inner == 1 && !hfsdp && !separate;  // The main parameters are the whole ones.
  const std::int64_t reductions = accumulation.sync ? accumulation.backwards : 1;
  // [Sent as computed] What has not been added up travels over the inner ranks as autograd made it.
  const bool adds_up = !accumulation.sync && accumulation.backwards > 1;
  const auto inner_wire = !adds_up && precision.compute == at::kBFloat16 ? at::kBFloat16 : precision.wire;
  Bytes bytes;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const auto piece = units[u];
    const auto shard = piece * outer;
    const auto full = piece * ranks;
    // Parameters: the root stays present, and the last block from forward to backward.
    const std::int64_t per_backward = u == 0 || u + 1 == units.size() ? 1 : 2;
    const std::int64_t gathers = sharded_parameters  ? steps * accumulation.backwards * per_backward
                                 : sharded_optimizer ? (separate ? steps : steps - 1)
                                                     : 0;
    bytes.all_gather += gathers * (inner - 1) * travelling(shard);
    // All but the first are differences: half a byte each, and a scale in bf16.
    if (precision.int4_gather)
      bytes.all_gather += (gathers - 1) * (inner - 1) * (shard / kFormatBlock * (kFormatBlock / 2 + 2) - travelling(shard));
    if (hfsdp) bytes.all_gather += steps * (outer - 1) * travelling(piece);  // At first, and after each update.
    // Gradients.
    const std::int64_t reduced = steps * reductions;
    bytes.reduce_scatter += reduced * ((inner - 1) * shard * itemsize(inner_wire) + (outer - 1) * piece * itemsize(precision.wire));
    if (outer > 1 && !hfsdp) bytes.all_gather += reduced * (outer - 1) * piece * 4;
    if (!sharded_optimizer) bytes.all_gather += reduced * (inner - 1) * shard * 4;
    // What lives.
    const auto held = !sharded_optimizer ? full : hfsdp ? piece : shard;
    const bool shared = !separate && (!sharded_parameters || hfsdp);
    if (on_host) {
      bytes.host += held * 4 * 4;  // Parameters, gradients, and two states per element.
    } else {
      if (!shared || alone) bytes.main_parameters += held * 4;
      bytes.main_gradients += (sharded_gradients ? held : full) * 4;
      if (row.offload == Offload::kOptimizerState) bytes.host += held * 2 * 4;
    }
    if (!sharded_parameters) bytes.gathered_peak += full * itemsize(precision.compute);
    if (hfsdp) bytes.gathered_peak += (travelling(shard) + 63) / 64 * 64;
  }
  if (sharded_parameters) {
    std::int64_t neighbours = 0;  // The root, the unit in use, and the one read ahead.
    for (std::size_t u = 1; u + 1 < units.size(); ++u) neighbours = std::max(neighbours, units[u] + units[u + 1]);
    bytes.gathered_peak += (units[0] + neighbours) * ranks * itemsize(precision.compute);
  }
  if (alone) bytes.gathered_peak = 0;
  return bytes;
}

/// `change`: what stands between the engine and the meshes' own communicators.
void expect_unsharded_training(const Precision& precision, int ranks,
                               const std::function<fsdp::DeviceMesh(const fsdp::DeviceMesh&)>& change) {
  run_ranks(
      ranks,
      [&](int rank) {
        const auto line = change(fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}));
        const auto plane = change(fsdp::init_device_mesh("cpu", {{"dp_outer", ranks > 1 ? 2 : 1}, {"dp_shard", -1}}));
        for (const auto& accumulation : kAccumulations) {
          const auto flat = train_reference(precision, accumulation, ranks, ranks);
          const auto in_rows = train_reference(precision, accumulation, ranks, ranks > 1 ? ranks / 2 : 1);
          std::map<std::string, std::int64_t> peaks;
          for (const auto& row : rows()) {
            const auto& strategy = row.strategy;
            const bool parameters_stay = strategy.placements == Placements::optim() || strategy.placements == Placements::optim_grads();
            if (precision.int4_gather && !parameters_stay) continue;
            SCOPED_TRACE(strategy.name + ", " + precision.name + ", " + accumulation.name + (row.checkpoint ? ", checkpointed" : "") +
                         ", offload " + std::to_string(static_cast<int>(row.offload)));
            auto model = make_stack({.checkpoint = row.checkpoint});
            fsdp::FullyShardOptions options{.mesh = strategy.two_dimensions ? plane : line,
                                            .units = stack_units(),
                                            .placements = strategy.placements,
                                            .outer_placements = strategy.outer,
                                            .offload = row.offload};
            if (precision.policy)
              options.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = precision.compute, .grad_comm_dtype = precision.wire};
            if (precision.in_format()) {
              const auto format = precision.format();
              options.gather_format = [format](const std::string&, const at::Tensor&) { return format; };
            }
            auto sharded = fsdp::fully_shard(*model, options);
            fsdp::AdamW optimizer(*model, {.lr = 1e-2, .weight_decay = 0.1});
            sharded.reset_wire_stats();
            std::vector<float> losses;
            std::vector<std::pair<std::string, at::Tensor>> gradients;
            for (int step = 0; step < precision.steps(); ++step) {
              for (int backward = 0; backward < accumulation.backwards; ++backward) {
                sharded.set_requires_gradient_sync(accumulation.sync || backward + 1 == accumulation.backwards);
                const auto loss = loss_of(model, precision.compute, step, backward, rank);
                loss.backward();
                losses.push_back(loss.item<float>());
              }
              if (step + 1 == precision.steps()) {
                const auto expected = expected_bytes(row, precision, accumulation, ranks);
                const auto stats = sharded.memory_stats();
                const auto wire = sharded.wire_stats();
                EXPECT_EQ(wire.all_gather_bytes, expected.all_gather);
                EXPECT_EQ(wire.reduce_scatter_bytes, expected.reduce_scatter);
                EXPECT_EQ(stats.main_gradients.live, expected.main_gradients);
                EXPECT_EQ(stats.main_parameters.live, expected.main_parameters);
                EXPECT_EQ(stats.gathered_parameters.peak, expected.gathered_peak);
                EXPECT_EQ(stats.host.live, expected.host);
                if (row.offload == Offload::kNone) peaks[strategy.name] = stats.total.peak;
                gradients = sharded.full_gradients();
                optimizer.step();
              } else {
                optimizer.step();
              }
              optimizer.zero_grad();
            }
            const auto& reference = strategy.two_dimensions && precision.wire != at::kFloat ? in_rows : flat;
            for (std::size_t i = 0; i < losses.size(); ++i) {
              EXPECT_EQ(losses[i], reference.losses[i][static_cast<std::size_t>(rank)]) << "backward " << i;
            }
            const auto parameters = sharded.full_parameters();
            for (std::size_t i = 0; i < parameters.size(); ++i) {
              EXPECT_TRUE(same_bits(gradients[i].second, reference.gradients[i])) << "gradient of " << parameters[i].first;
              EXPECT_TRUE(same_bits(parameters[i].second, reference.parameters[i])) << parameters[i].first;
            }
            if (::testing::Test::HasFailure()) return;
          }
          // Without staging, which whole gradients need more of, both hold all of these until they are reduced, and one has shards, too.
          const bool staged = line.communicator("dp_shard")->staging_numel(1) > 0;
          if (accumulation.sync || staged) {
            EXPECT_LE(peaks["optim_grads"], peaks["optim"]) << accumulation.name;
          }
        }
      },
      std::chrono::seconds(240));
}

class Matrix : public ::testing::TestWithParam<std::tuple<Precision, int>> {};

TEST_P(Matrix, EqualsTheUnshardedTraining) {
  const auto& [precision, ranks] = GetParam();
  expect_unsharded_training(precision, ranks, [](const fsdp::DeviceMesh& mesh) { return mesh; });
}

/// What the engine reads before it has arrived, or writes while it travels, is NaN or a failure.
class UnkindMatrix : public ::testing::TestWithParam<Precision> {};

TEST_P(UnkindMatrix, EqualsTheUnshardedTraining) {
  fsdp::memory::fill_slots_with_nan(true);
  expect_unsharded_training(GetParam(), 2, [](const fsdp::DeviceMesh& mesh) {
    return fsdp::testing::unkind(mesh, {.seed = 1, .max_delay = std::chrono::microseconds(0)});
  });
  fsdp::memory::fill_slots_with_nan(false);
}

#ifdef FSDP_SANITIZED
// Sanitizers look at memory, not at values, and take their time.
const std::vector<int> kRanks = {2};
#else
const std::vector<int> kRanks = {1, 2, 4};
#endif

INSTANTIATE_TEST_SUITE_P(
    Precisions, Matrix,
    ::testing::Combine(::testing::Values(Precision{.name = "Fp32", .policy = false}, Precision{.name = "Bf16", .compute = at::kBFloat16},
                                         Precision{.name = "Bf16Wire", .compute = at::kBFloat16, .wire = at::kBFloat16},
                                         Precision{.name = "Fp32ComputeBf16Wire", .wire = at::kBFloat16},
                                         Precision{.name = "Float8Gather", .compute = at::kBFloat16, .float8_gather = true},
                                         Precision{.name = "Int4Gather", .compute = at::kBFloat16, .int4_gather = true},
                                         Precision{.name = "Int4GatherTransformed", .int4_gather = true, .hadamard = true}),
                       ::testing::ValuesIn(kRanks)),
    [](const auto& info) { return std::get<0>(info.param).name + "On" + std::to_string(std::get<1>(info.param)); });

INSTANTIATE_TEST_SUITE_P(Precisions, UnkindMatrix,
                         ::testing::Values(Precision{.name = "Fp32", .policy = false}, Precision{.name = "Bf16", .compute = at::kBFloat16},
                                           Precision{.name = "Bf16Wire", .compute = at::kBFloat16, .wire = at::kBFloat16},
                                           Precision{.name = "Int4Gather", .compute = at::kBFloat16, .int4_gather = true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace matrix_test
