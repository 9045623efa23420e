#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/random.h"
#include "support/random_model.h"

// A training run that follows from its seed: the model, the steps, how it is computed, and two ways to shard it that must not matter.
namespace fsdp::testing {

enum class Algorithm : std::uint8_t { kAdamW, kSGD, kAdagrad, kMuon, kAdamW8bit };

/// One backward.
struct PassPlan {
  bool sync = true;
  bool all_reduce = true;  ///< Over the outer dimension of a 2-D mesh, too.
  bool is_last = true;     ///< Its end waits for its reductions.
};

/// A pass that is to fail after so many computations of blocks, forward or backward, and then so many operators, which may be the
/// library's. If it has fewer, it is one like others.
struct FailingPass {
  bool planned = false;
  std::size_t before = 0;  ///< Before which backward of the step.
  std::int64_t fuse = 0;
  std::int64_t operators = -1;  ///< Negative: the block itself throws.
  bool sync = true;
  bool reset = false;  ///< The user calls reset() after it.
};

struct StepPlan {
  bool zero_grad = true;
  std::vector<PassPlan> passes;   ///< The last one is reduced over all ranks.
  bool graphs_at_once = false;    ///< All forwards come before the first backward.
  bool penalty = false;           ///< The loss contains a gradient.
  bool evaluate_between = false;  ///< An evaluation between forward and backward.
  bool evaluate_before_update = false;
  bool evaluate_after = false;
  bool clip = false;
  double scale = 1;    ///< Of the reduced gradients.
  bool write = false;  ///< Parameters are written by an operator after the optimizer's step.
  FailingPass failure;
  bool reload = false;  ///< At the end, what was saved goes on in a fresh model, sharded like Case::reloaded.
};

enum class Values : std::uint8_t { kOwn, kDeferred, kFromRank0 };

/// How a model is sharded. Changes no bit of the result, but for the order of sums on a mesh of two dimensions.
struct Settings {
  std::string strategy = "optim_grads_params";
  std::int64_t outer = 1;  ///< Rows of a mesh of two dimensions; 1: there is one dimension.
  bool hfsdp = false;
  Offload offload = Offload::kNone;
  int prefetch_depth = 0;
  std::uint64_t prefetch_lists = 0;  ///< If not 0, seeds which units are gathered ahead of which.
  bool reshard_after_forward = true;
  std::int64_t reshard_after_forward_size = 0;
  std::int64_t keep_gathered_bytes = 0;
  Values values = Values::kOwn;
  std::uint64_t division = 0;  ///< Seeds which modules become units.
  int percent_units = 30;
  bool unit_group = false;  ///< Two modules that are not neighbours are one unit.
  bool separate_reduce_group = false;
  bool report_nan = false;
  std::uint64_t disturbance = 0;  ///< If not 0, seeds explicit unshard(), reshard() and changes of options between steps.
};

/// The dtypes of a parameter's life, if there is a policy.
struct Precision {
  std::string name;
  at::ScalarType compute = at::kFloat;
  at::ScalarType main_gradient = at::kFloat;
  at::ScalarType wire = at::kFloat;
};

struct Case {
  std::uint64_t seed = 0;
  int ranks = 1;            ///< Data-parallel ones.
  std::int64_t pieces = 1;  ///< Every parameter is so many tensor-parallel pieces; each has the ranks above to itself.
  ModelPlan model;
  std::int64_t share = 1;  ///< Sequences per rank.
  std::vector<StepPlan> steps;
  Algorithm algorithm = Algorithm::kAdamW;
  bool groups = false;  ///< Some parameters have their own learning rate and weight decay.
  bool has_policy = false;
  Precision precision;
  bool float8 = false;  ///< Some parameters travel in eight bits.
  /// If set, gradients are rounded before they are sent. The two ways to shard have the same units and meshes then, and are compared with
  /// each other only.
  std::optional<GradCommFormat> grad_comm = {};
  bool ignoring = false;
  bool any_granularity = false;      ///< Otherwise all are cut between any elements, or as the algorithm asks for.
  bool uniform_granularity = false;  ///< Any, but the same for all.
  bool unkind = false;               ///< Communicators delay, deliver late, and spoil buffers before (unkind_communicator.h).
  bool fill_slots = false;           ///< The engine's buffers hold NaN when they are lent and when they have come back.
  Settings first;
  Settings second;
  Settings reloaded;

  /// Whether a sum that is made in several steps has other digits even on one rank.
  bool rounds() const { return has_policy && (precision.wire != at::kFloat || precision.main_gradient != at::kFloat); }
  bool delays_sums() const {
    return std::any_of(steps.begin(), steps.end(), [](const auto& step) {
      return std::any_of(step.passes.begin(), step.passes.end(), [](const auto& pass) { return !pass.sync; }) ||
             (step.failure.planned && !step.failure.sync);
    });
  }
  /// Whether gradients of several backwards add up.
  bool adds_up() const {
    return std::any_of(steps.begin(), steps.end(),
                       [](const auto& step) { return !step.zero_grad || step.passes.size() > 1 || step.failure.planned; });
  }
  bool delays_outer_sums() const {
    return std::any_of(steps.begin(), steps.end(), [](const auto& step) {
      return std::any_of(step.passes.begin(), step.passes.end(), [](const auto& pass) { return !pass.all_reduce; });
    });
  }
  /// Gradients are added up in an order that the documents give. It is open where backward comes to a unit several times (it is used in
  /// several places, by a repeated forward, or by the gradient within a loss; or once more where all ranks use an optional module), when
  /// what earlier backwards have left has been reduced at the first of them. A checkpoint delivers the gradients of several uses one by
  /// one: until the ranks have agreed on a later departure, what came before the first one is summed over the ranks on its own, and added
  /// to what earlier backwards gave.
  bool sums_in_order() const {
    const bool one_by_one = model.recompute != Recompute::kNone && (model.sharing || model.looping);
    const bool several_uses = model.sharing || model.looping || model.attending || first.unit_group || second.unit_group ||
                              model.recompute != Recompute::kNone || has_penalty();
    return !(one_by_one && (ranks > 1 || adds_up())) && !((delays_sums() || delays_outer_sums()) && several_uses);
  }
  bool has_penalty() const {
    return std::any_of(steps.begin(), steps.end(), [](const auto& step) { return step.penalty; });
  }
  /// In how many parts each unit's main parameters lie.
  std::int64_t parts(const Settings& settings) const {
    if (settings.strategy == "no_shard") return 1;
    return settings.hfsdp ? ranks : ranks / settings.outer;
  }
  /// ATen's kernels round the last elements of a tensor, fewer than a vector register's, differently. Shards that are cut between any
  /// elements end elsewhere than whole parameters.
  bool same_ends(const Settings& settings) const { return !any_granularity || parts(settings) == 1; }
  bool same_ends(const Settings& a, const Settings& b) const {
    const bool same_units = a.division == b.division && a.percent_units == b.percent_units && a.unit_group == b.unit_group;
    return !any_granularity || (parts(a) == parts(b) && (same_units || parts(a) == 1));
  }
};

constexpr std::int64_t kFloat8Block = 32;

inline int ranks_of(std::uint64_t seed) {
  static const std::vector<int> counts = {2, 2, 2, 2, 2, 2, 2, 1, 1, 3, 3, 3, 4, 4, 4, 5};
  return counts[mixed(seed, "ranks") % counts.size()];
}

/// Pieces of a model hear of each other in norms and checkpoints alone: each is a model of its own.
inline std::int64_t pieces_of(std::uint64_t seed) { return ranks_of(seed) % 2 == 0 && mixed(seed, "pieces") % 6 == 0 ? 2 : 1; }

inline Settings make_settings(Random& random, const Case& c) {
  static const std::vector<std::string> strategies = {"no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params"};
  Settings s;
  s.strategy = random.pick(strategies);
  std::vector<std::int64_t> rows;
  for (std::int64_t outer = 2; outer <= c.ranks; ++outer) {
    if (c.ranks % outer == 0) rows.push_back(outer);
  }
  if (!rows.empty() && random.chance(40)) s.outer = random.pick(rows);
  s.hfsdp = s.outer > 1 && s.strategy == "optim_grads_params" && random.chance(50);
  if (random.chance(30)) s.offload = random.chance(50) ? Offload::kAll : Offload::kOptimizerState;
  if (c.algorithm == Algorithm::kAdagrad && s.offload == Offload::kOptimizerState) s.offload = Offload::kNone;
  s.prefetch_depth = static_cast<int>(random.below(4));
  s.prefetch_lists = random.chance(20) ? random.bits() : 0;
  s.reshard_after_forward = random.chance(65);
  const auto inner = c.ranks / s.outer;
  if (inner == 4 && s.strategy == "optim_grads_params" && random.chance(40)) s.reshard_after_forward_size = 2;
  if (random.chance(25)) s.keep_gathered_bytes = random.below(20000);
  s.values = random.pick(std::vector{Values::kOwn, Values::kOwn, Values::kDeferred, Values::kFromRank0});
  if (c.ignoring && s.values == Values::kFromRank0) s.values = Values::kDeferred;
  s.division = random.bits();
  s.percent_units = random.pick(std::vector{0, 15, 30, 60, 100});
  s.unit_group = !c.model.sharing && random.chance(15);
  s.separate_reduce_group = random.chance(15);
  s.report_nan = random.chance(10);
  s.disturbance = random.chance(20) ? random.bits() : 0;
  return s;
}

inline Case make_case(std::uint64_t seed) {
  static const std::vector<Precision> precisions = {
      {"bf16", at::kBFloat16, at::kFloat, at::kFloat},
      {"bf16, wire bf16", at::kBFloat16, at::kFloat, at::kBFloat16},
      {"bf16, main gradients and wire bf16", at::kBFloat16, at::kBFloat16, at::kBFloat16},
      {"bf16, main gradients bf16, wire fp32", at::kBFloat16, at::kBFloat16, at::kFloat},
      {"fp32, wire bf16", at::kFloat, at::kFloat, at::kBFloat16},
      {"fp16, wire fp16", at::kHalf, at::kFloat, at::kHalf},
      {"fp32 by a policy", at::kFloat, at::kFloat, at::kFloat},
  };
  Random random(seed);
  Case c;
  c.seed = seed;
  c.pieces = pieces_of(seed);
  c.ranks = ranks_of(seed) / static_cast<int>(c.pieces);
  c.unkind = mixed(seed, "unkind") % 3 == 0;
  c.fill_slots = mixed(seed, "fill") % 2 == 0;
  c.share = 1 + random.below(2);
  c.algorithm = random.pick(std::vector{Algorithm::kAdamW, Algorithm::kAdamW, Algorithm::kAdamW, Algorithm::kSGD, Algorithm::kAdagrad,
                                        Algorithm::kMuon, Algorithm::kAdamW8bit});
  c.model.scalars = c.pieces == 1;  // A scalar is no piece.
  // AdamW8bit's state has a value per block, which has no place in a whole. Muon updates whole matrices, and refuses pieces.
  const bool refuses_pieces = c.algorithm == Algorithm::kAdamW8bit || c.algorithm == Algorithm::kMuon;
  if (c.pieces > 1 && refuses_pieces) c.algorithm = Algorithm::kAdamW;
  const bool needs_fp32 = c.algorithm == Algorithm::kMuon || c.algorithm == Algorithm::kAdamW8bit;
  c.model.seed = random.bits() >> 1;
  c.has_policy = random.chance(45);
  if (c.has_policy) {
    c.precision = random.pick(precisions);
    if (needs_fp32) c.precision.main_gradient = at::kFloat;
    c.float8 = random.chance(30);
  } else {
    c.model.dtype = !needs_fp32 && random.chance(35) ? at::kDouble : at::kFloat;
    c.model.mixed_dtypes = !needs_fp32 && random.chance(30);
  }
  c.model.compute = c.has_policy ? c.precision.compute : c.model.dtype;
  c.model.freezing = random.chance(40);
  c.model.sharing = random.chance(50);
  c.ignoring = !c.has_policy && !c.model.sharing && random.chance(25);  // A shared parameter has several names.
  c.model.dropout = random.chance(30);
  c.model.recompute =
      random.pick(std::vector{Recompute::kNone, Recompute::kNone, Recompute::kLibrary, Recompute::kLibrary, Recompute::kNested});
  // In narrow dtypes rounding is no small thing: such cases are compared to the last bit, so their sums must have one order.
  const bool one_order = c.has_policy && c.model.recompute != Recompute::kNone && (c.ranks > 1 || c.rounds());
  // Where an operator fails, all ranks must have come to the same one.
  c.model.by_rank = random.chance(70);
  c.model.looping = !one_order && random.chance(50);
  c.model.sharing = c.model.sharing && !one_order;
  c.model.attending = !c.model.sharing && mixed(seed, "attending") % 3 == 0;  // A shared parameter is in no unit of an optional module.
  if (c.model.recompute == Recompute::kNested) c.model.dropout = false;       // It does not draw the same numbers again.
  c.model.dim = random.pick(std::vector<std::int64_t>{6, 8, 12});
  c.model.time = 2 + random.below(4);
  c.model.vocab = 5 + random.below(13);
  c.groups = c.algorithm != Algorithm::kAdagrad && random.chance(40);
  const bool cuts_anywhere = !needs_fp32 && !c.has_policy;
  c.any_granularity = cuts_anywhere && random.chance(30);
  c.uniform_granularity = random.chance(50);
  const bool may_delay =
      !c.has_policy || (!c.model.sharing && !c.model.looping && !c.model.attending && c.model.recompute == Recompute::kNone);
  const bool has_rows = may_delay && c.ranks > 1 && random.chance(30);
  for (auto steps = 2 + random.below(2); steps > 0; --steps) {
    StepPlan step;
    step.zero_grad = c.steps.empty() || random.chance(85);
    for (auto backwards = random.chance(50) ? 1 : 1 + random.below(3); backwards > 1; --backwards) {
      step.passes.push_back(
          {.sync = !may_delay || random.chance(50), .all_reduce = !has_rows || random.chance(50), .is_last = random.chance(70)});
    }
    step.passes.push_back({.is_last = random.chance(70)});
    step.graphs_at_once = random.chance(30);
    // A checkpoint's nested backward would reach the parameters, too.
    step.penalty = c.model.recompute == Recompute::kNone && (!c.has_policy || !may_delay) && random.chance(15);
    step.evaluate_between = random.chance(15);
    step.evaluate_before_update = random.chance(20);
    step.evaluate_after = random.chance(20);
    step.clip = random.chance(15);
    if (random.chance(15)) step.scale = random.chance(50) ? 0.5 : 1.0 / 3;
    step.write = !c.float8 && random.chance(15);
    if (random.chance(20)) {
      step.failure = {
          .planned = true,
          .before = step.graphs_at_once ? 0 : static_cast<std::size_t>(random.below(static_cast<std::int64_t>(step.passes.size()))),
          .fuse = random.below(50),
          .operators = c.model.by_rank ? -1 : random.below(20),
          .sync = !may_delay || random.chance(70),
          .reset = random.chance(50)};
    }
    if (c.model.attending) {
      step.failure.operators = -1;
      step.penalty = false;  // A gradient within the loss is a backward, and so is the loss's.
      // What a rank has gathered for several forwards, it keeps until the last of their backwards.
      for (auto& pass : step.passes) pass.is_last = pass.is_last && (!step.graphs_at_once || &pass == &step.passes.back());
    }
    step.reload = random.chance(15);
    c.steps.push_back(step);
  }
  c.steps.back().reload = false;
  for (std::size_t s = 1; s < c.steps.size(); ++s) c.steps[s].zero_grad = c.steps[s].zero_grad || c.steps[s - 1].reload;
  c.first = make_settings(random, c);
  c.second = make_settings(random, c);
  c.reloaded = make_settings(random, c);
  // The report comes when a backward has ended: an operator that fails in it leaves the gradients.
  if (std::any_of(c.steps.begin(), c.steps.end(), [](const auto& step) { return step.failure.planned && step.failure.operators >= 0; })) {
    c.first.report_nan = c.second.report_nan = c.reloaded.report_nan = false;
  }
  if (c.ranks > 1 && c.model.dtype == at::kFloat && !c.model.mixed_dtypes && mixed(seed, "rounding") % 6 == 0) {
    const auto draw = mixed(seed, "format");
    c.grad_comm = GradCommFormat{.bits = draw % 2 == 0 ? 8 : 4,
                                 .block = draw / 2 % 2 == 0 ? 32 : 64,
                                 .hadamard = draw / 4 % 2 == 0,
                                 .stochastic_rounding = draw / 8 % 2 == 0,
                                 .error_feedback = draw / 16 % 2 == 0};
    for (auto& step : c.steps) step.failure.operators = -1;  // What has been reduced before an operator fails differs.
    c.any_granularity = false;
    c.second.division = c.first.division;
    c.second.percent_units = c.first.percent_units;
    c.second.unit_group = c.first.unit_group;
    c.second.outer = c.first.outer;
    // Reductions without gradients count, and send what was lost [Rounded once].
    if (c.grad_comm->error_feedback || c.grad_comm->stochastic_rounding) {
      c.second.strategy = c.first.strategy;
      c.second.offload = c.first.offload;
    }
    c.second.hfsdp = c.first.hfsdp && c.second.strategy == "optim_grads_params";
    c.second.reshard_after_forward_size = 0;
  }
  if (!c.sums_in_order()) {
    c.second.division = c.first.division;
    c.second.percent_units = c.first.percent_units;
    c.first.unit_group = c.second.unit_group = false;
    c.first.outer = c.second.outer = 1;
    c.first.hfsdp = c.second.hfsdp = false;
  }
  return c;
}

/// What a fresh model is sharded like that goes on where `settings` was saved: on the same mesh, so that sums keep their order.
inline Settings reloaded_settings(const Case& c, const Settings& settings) {
  auto reloaded = c.reloaded;
  reloaded.values = Values::kOwn;
  reloaded.outer = settings.outer;
  reloaded.reshard_after_forward_size = 0;
  reloaded.hfsdp = settings.outer > 1 && reloaded.strategy == "optim_grads_params" && reloaded.hfsdp;
  if (c.any_granularity) {
    reloaded.strategy = settings.strategy;
    reloaded.hfsdp = settings.hfsdp;
  }
  if (!c.sums_in_order() || c.any_granularity) {
    reloaded.division = settings.division;
    reloaded.percent_units = settings.percent_units;
    reloaded.unit_group = settings.unit_group;
  }
  if (c.delays_sums() || c.delays_outer_sums()) reloaded.unit_group = false;
  return reloaded;
}

inline std::string described(const Settings& s) {
  static const char* const offloads[] = {"", ", offload of optimizer state", ", offload of all"};
  static const char* const values[] = {"", ", deferred_init", ", values from rank 0"};
  std::ostringstream text;
  text << s.strategy;
  if (s.outer > 1) text << " on " << s.outer << " rows" << (s.hfsdp ? " (HFSDP)" : "");
  text << ", units " << s.percent_units << "%" << (s.unit_group ? " and a unit group" : "") << ", prefetch_depth " << s.prefetch_depth
       << (s.prefetch_lists != 0 ? " and lists" : "") << offloads[static_cast<int>(s.offload)] << values[static_cast<int>(s.values)]
       << (s.reshard_after_forward ? "" : ", no reshard_after_forward");
  if (s.reshard_after_forward_size != 0) text << ", reshard_after_forward_size " << s.reshard_after_forward_size;
  if (s.keep_gathered_bytes != 0) text << ", keep_gathered_bytes " << s.keep_gathered_bytes;
  text << (s.separate_reduce_group ? ", separate_reduce_group" : "") << (s.report_nan ? ", report_nan" : "")
       << (s.disturbance != 0 ? ", disturbed" : "");
  return text.str();
}

inline std::string described(const Case& c) {
  static const char* const algorithms[] = {"AdamW", "SGD", "Adagrad", "Muon", "AdamW8bit"};
  static const char* const recomputes[] = {"", ", nested checkpoints", ", activation_checkpoint"};
  std::ostringstream text;
  text << "case " << c.seed << ": " << c.ranks << " rank(s), " << (c.pieces > 1 ? "of each tensor-parallel piece, " : "")
       << (c.has_policy ? c.precision.name : std::string(c10::toString(c.model.dtype)) + (c.model.mixed_dtypes ? " mixed" : ""))
       << (c.float8 ? ", float8 gathers" : "") << (c.grad_comm ? ", gradients in " + std::to_string(c.grad_comm->bits) + " bits" : "")
       << (c.ignoring ? ", ignored parameters" : "") << (c.model.freezing ? ", frozen parameters" : "")
       << (c.model.looping ? "" : ", no loops") << (c.model.attending ? ", ranks that skip" : "")
       << (c.model.sharing ? ", shared parameters" : "") << (c.model.dropout ? ", dropout" : "")
       << recomputes[static_cast<int>(c.model.recompute)] << ", " << algorithms[static_cast<int>(c.algorithm)]
       << (c.groups ? " with groups" : "") << (c.unkind ? ", unkind communicators" : "") << (c.fill_slots ? ", slots filled with NaN" : "")
       << (c.any_granularity ? ", any granularity" : "") << "\n  first: " << described(c.first) << "\n  second: " << described(c.second);
  for (const auto& step : c.steps) {
    text << "\n  step:" << (step.zero_grad ? "" : " gradients kept,") << " backwards";
    for (const auto& pass : step.passes) {
      text << (pass.sync ? " sync" : " no_sync") << (pass.all_reduce ? "" : "/inner only") << (pass.is_last ? "" : "/not last");
    }
    text << (step.graphs_at_once ? ", graphs at once" : "") << (step.penalty ? ", penalty" : "") << (step.clip ? ", clip" : "");
    if (step.scale != 1) text << ", gradients scaled";
    text << (step.evaluate_between ? ", evaluation between" : "") << (step.evaluate_before_update ? ", evaluation before the update" : "")
         << (step.evaluate_after ? ", evaluation after" : "") << (step.write ? ", write" : "");
    if (step.failure.planned) {
      text << ", a pass " << (step.failure.sync ? "" : "without sync ") << "before backward " << step.failure.before << " fails after "
           << step.failure.fuse << " blocks";
      if (step.failure.operators >= 0) text << " and " << step.failure.operators << " operators";
      text << (step.failure.reset ? ", reset()" : "");
    }
    if (step.reload) text << ", saved and loaded as " << described(reloaded_settings(c, c.first)) << " (of the first)";
  }
  return text.str();
}

/// A step has so many batches: the first ones are for its passes, and one each for the pass that is to fail and for evaluations. In the
/// pass that is to fail, all ranks use all modules, so that they fail in the same place.
constexpr std::uint64_t kBatchesOfStep = 10, kFailingBatch = 8, kEvaluationBatch = 9;

/// The part [part * share, (part + 1) * share) of the global batch number `index`.
inline Batch make_batch(const Case& c, std::uint64_t index, std::int64_t part) {
  auto generator = at::detail::createCPUGenerator(mixed(c.seed, index));
  const auto sequences = c.share * c.ranks;
  const auto options = at::TensorOptions().dtype(c.model.dtype);
  const auto tokens = at::randint(c.model.vocab, {sequences, c.model.time}, generator, at::kLong);
  const auto features = at::randn({sequences, c.model.time, c.model.dim}, generator, options).to(c.model.compute);
  const auto targets = at::randn({sequences, c.model.time, c.model.dim}, generator, options).to(c.model.compute);
  return {.tokens = tokens.narrow(0, part * c.share, c.share),
          .features = features.narrow(0, part * c.share, c.share),
          .targets = targets.narrow(0, part * c.share, c.share),
          .decision = static_cast<std::uint64_t>(tokens.sum().item<std::int64_t>()),
          .part = part,
          .all_attend = index % kBatchesOfStep == kFailingBatch};
}

/// Not where ranks use different parameters: if one's are ignored, it does not touch the unit that the others touch.
inline bool is_ignored(const Case& c, const std::string& name) {
  const bool by_rank =
      name.find("local") != std::string::npos || name.find("sometimes") != std::string::npos || name.find("optional") != std::string::npos;
  // What backward uses first tells the engine of it.
  return c.ignoring && !by_rank && name != "gain" && mixed(c.seed + 4, name) % 100 < 15;
}
inline bool is_gathered_in_float8(const Case& c, const std::string& name) { return c.float8 && mixed(c.seed + 5, name) % 100 < 60; }

}  // namespace fsdp::testing
