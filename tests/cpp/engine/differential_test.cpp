// Random models, unit divisions, options and training programs: sharded twice, with different strategies, against the same model whole in
// one process. Every random choice of a case follows from its seed, which a failure prints:
//
//   FSDP_TEST_SEED=1234 FSDP_TEST_CASES=1 test_engine --gtest_filter='*Differential*'

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/multi_rank.h"
#include "support/random_model.h"
#include "support/same_bits.h"

namespace differential_test {

using fsdp::FSDPModule;
using fsdp::Granularity;
using fsdp::testing::Batch;
using fsdp::testing::distinct_parameters;
using fsdp::testing::Failure;
using fsdp::testing::mixed;
using fsdp::testing::ModelBuilder;
using fsdp::testing::ModelPlan;
using fsdp::testing::NamedTensors;
using fsdp::testing::Random;
using fsdp::testing::RandomModel;

#ifdef FSDP_SANITIZED
constexpr std::uint64_t kCases = 52;  // Each takes several times longer.
#else
constexpr std::uint64_t kCases = 208;
#endif

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

// A case.

enum class Algorithm : std::uint8_t { kAdamW, kSGD, kWrapped };

struct StepPlan {
  bool zero_grad = true;
  std::vector<bool> sync;         ///< One backward each; the last is always synchronized.
  bool graphs_at_once = false;    ///< All forwards come before the first backward.
  bool penalty = false;           ///< The loss contains a gradient.
  bool evaluate_between = false;  ///< An evaluation between forward and backward.
  bool evaluate_before_update = false;
  bool evaluate_after = false;
  bool clip = false;
  bool write = false;                ///< Parameters are written by an operator after the optimizer's step.
  Failure failure = Failure::kNone;  ///< A forward or backward that throws, before the step begins.
};

/// What may differ between two runs that must agree in every bit.
struct Settings {
  std::string strategy;
  int prefetch_depth = 0;
  bool reshard_after_forward = true;
  std::uint64_t disturbance = 0;  ///< If not 0, seeds explicit unshard(), reshard() and changes of options between steps.
};

struct Case {
  std::uint64_t seed = 0;
  int ranks = 1;
  ModelPlan model;
  std::int64_t share = 1;  ///< Sequences per rank.
  std::vector<StepPlan> steps;
  Algorithm algorithm = Algorithm::kAdamW;
  bool groups = false;  ///< Some parameters have their own learning rate and weight decay.
  int percent_units = 30;
  bool any_granularity = false;      ///< Otherwise all are cut between any elements.
  bool uniform_granularity = false;  ///< Any, but the same for all.
  Settings first;
  Settings second;

  bool clips() const {
    return std::any_of(steps.begin(), steps.end(), [](const auto& step) { return step.clip; });
  }

  /// Gradients are added up in the order of plain accumulation. What the engine collects before it reduces (of backwards without
  /// synchronization, of a checkpoint's several uses of a parameter) is added to what was reduced before as one sum: m + (a + b).
  bool sums_in_order() const {
    bool reduced = false;
    for (const auto& step : steps) {
      if (step.zero_grad) reduced = false;
      for (const bool sync : step.sync) {
        if (reduced && (!sync || model.checkpointing)) return false;
        reduced = reduced || sync;
      }
    }
    return true;
  }
};

int ranks_of(std::uint64_t seed) { return static_cast<int>(mixed(seed, "ranks") % 4) + 1; }

Case make_case(std::uint64_t seed) {
  Random random(seed);
  Case c;
  c.seed = seed;
  c.ranks = ranks_of(seed);
  c.share = 1 + random.below(2);
  c.model.seed = random.bits() >> 1;
  c.model.dtype = random.chance(35) ? at::kDouble : at::kFloat;
  c.model.mixed_dtypes = random.chance(30);
  c.model.freezing = random.chance(40);
  c.model.checkpointing = random.chance(30);
  c.model.dim = random.pick(std::vector<std::int64_t>{6, 8, 12});
  c.model.time = 2 + random.below(4);
  c.model.vocab = 5 + random.below(13);
  c.algorithm = random.pick(std::vector{Algorithm::kAdamW, Algorithm::kAdamW, Algorithm::kSGD, Algorithm::kWrapped});
  c.groups = c.algorithm != Algorithm::kWrapped && random.chance(40);
  c.percent_units = random.pick(std::vector{0, 15, 30, 60, 100});
  c.any_granularity = random.chance(35);
  c.uniform_granularity = random.chance(50);
  for (auto steps = 2 + random.below(2); steps > 0; --steps) {
    StepPlan step;
    step.zero_grad = c.steps.empty() || random.chance(85);
    for (auto backwards = random.chance(50) ? 1 : 1 + random.below(3); backwards > 1; --backwards) step.sync.push_back(random.chance(50));
    step.sync.push_back(true);
    step.graphs_at_once = random.chance(30);
    // A checkpoint's nested backward would reach the parameters, too.
    step.penalty = !c.model.checkpointing && random.chance(15);
    step.evaluate_between = random.chance(15);
    step.evaluate_before_update = random.chance(20);
    step.evaluate_after = random.chance(20);
    step.clip = random.chance(15);
    step.write = random.chance(15);
    if (step.zero_grad && random.chance(12)) step.failure = random.chance(50) ? Failure::kForward : Failure::kBackward;
    c.steps.push_back(step);
  }
  const std::vector<std::string> strategies = {"no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params"};
  for (auto* settings : {&c.first, &c.second}) {
    settings->strategy = random.pick(strategies);
    settings->prefetch_depth = static_cast<int>(random.below(4));
    settings->reshard_after_forward = random.chance(60);
    settings->disturbance = random.chance(20) ? random.bits() : 0;
  }
  while (c.second.strategy == c.first.strategy && c.second.strategy != "optim_grads_params") c.second.strategy = random.pick(strategies);
  return c;
}

std::string described(const Case& c) {
  std::ostringstream text;
  text << "case FSDP_TEST_SEED=" << c.seed << " FSDP_TEST_CASES=1: " << c.ranks << " rank(s), " << c.steps.size() << " steps, "
       << c10::toString(c.model.dtype) << (c.model.mixed_dtypes ? " mixed" : "") << (c.model.freezing ? ", freezing" : "")
       << (c.model.checkpointing ? ", checkpointing" : "") << ", algorithm " << static_cast<int>(c.algorithm) << ", " << c.percent_units
       << "% units" << (c.any_granularity ? ", any granularity" : "");
  for (const auto& settings : {c.first, c.second}) {
    text << "; " << settings.strategy << ", prefetch_depth " << settings.prefetch_depth
         << (settings.reshard_after_forward ? "" : ", no reshard_after_forward") << (settings.disturbance != 0 ? ", disturbed" : "");
  }
  for (const auto& step : c.steps) {
    text << "\n  step:" << (step.zero_grad ? "" : " gradients kept,") << " backwards";
    for (const bool sync : step.sync) text << (sync ? " sync" : " no_sync");
    text << (step.graphs_at_once ? ", graphs at once" : "") << (step.penalty ? ", penalty" : "") << (step.clip ? ", clip" : "")
         << (step.evaluate_between ? ", evaluation between" : "") << (step.evaluate_before_update ? ", evaluation before the update" : "")
         << (step.evaluate_after ? ", evaluation after" : "") << (step.write ? ", write" : "") << ", failure "
         << static_cast<int>(step.failure);
  }
  return text.str();
}

/// The part [part * share, (part + 1) * share) of the global batch number `index`.
Batch make_batch(const Case& c, std::uint64_t index, std::int64_t part) {
  auto generator = at::detail::createCPUGenerator(mixed(c.seed, index));
  const auto sequences = c.share * c.ranks;
  const auto options = at::TensorOptions().dtype(c.model.dtype);
  const auto tokens = at::randint(c.model.vocab, {sequences, c.model.time}, generator, at::kLong);
  const auto features = at::randn({sequences, c.model.time, c.model.dim}, generator, options);
  const auto targets = at::randn({sequences, c.model.time, c.model.dim}, generator, options);
  return {.tokens = tokens.narrow(0, part * c.share, c.share),
          .features = features.narrow(0, part * c.share, c.share),
          .targets = targets.narrow(0, part * c.share, c.share),
          .decision = static_cast<std::uint64_t>(tokens.sum().item<std::int64_t>()),
          .part = part};
}

// Optimizers: the same hyperparameters for both sides.

constexpr double kLr = 1e-2;
constexpr double kWeightDecay = 1e-2;
constexpr double kMomentum = 0.9;
// With a common, tiny eps, Adam divides what may be rounding noise by its own size. With this one an update's error is at most the
// gradient's.
constexpr double kEps = 1e-2;
constexpr double kGroupLr = 3e-2;
constexpr double kGroupWeightDecay = 0;
constexpr double kMaxNorm = 0.5;

double lr_factor(std::size_t step) { return 1.0 / (1.0 + 0.5 * static_cast<double>(step)); }

bool in_group(const Case& c, const std::string& name) { return c.groups && mixed(c.seed, name) % 3 == 0; }

std::unique_ptr<torch::optim::Optimizer> torch_optimizer(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::Adagrad>(std::move(parameters), torch::optim::AdagradOptions(kLr).eps(kEps));
}

std::unique_ptr<fsdp::Optimizer> sharded_optimizer(const Case& c, torch::nn::Module& model) {
  std::vector<fsdp::ParamGroup> groups;
  if (c.groups) {
    groups.push_back(
        {.matches = [&c](const std::string& name) { return in_group(c, name); }, .lr = kGroupLr, .weight_decay = kGroupWeightDecay});
  }
  switch (c.algorithm) {
    case Algorithm::kAdamW:
      return std::make_unique<fsdp::AdamW>(model, fsdp::AdamWOptions{.lr = kLr, .eps = kEps, .weight_decay = kWeightDecay}, groups);
    case Algorithm::kSGD:
      return std::make_unique<fsdp::SGD>(model, fsdp::SGDOptions{.lr = kLr, .momentum = kMomentum, .weight_decay = kWeightDecay}, groups);
    case Algorithm::kWrapped:
      break;
  }
  return std::make_unique<fsdp::WrappedOptimizer>(model, torch_optimizer);
}

/// ATen's fused kernels, as torch's own optimizers call them, parameter by parameter.
class WholeOptimizer {
 public:
  WholeOptimizer(const Case& c, const NamedTensors& parameters) : algorithm_(c.algorithm) {
    if (algorithm_ == Algorithm::kWrapped) {
      std::vector<at::Tensor> tensors;
      for (const auto& [name, parameter] : parameters) tensors.push_back(parameter);
      torch_ = torch_optimizer(std::move(tensors));
      return;
    }
    for (const auto& [name, parameter] : parameters) {
      const bool grouped = in_group(c, name);
      states_.push_back({.parameter = parameter,
                         .lr = grouped ? kGroupLr : kLr,
                         .weight_decay = grouped ? kGroupWeightDecay : kWeightDecay,
                         .first = at::zeros_like(parameter),
                         .second = at::zeros_like(parameter),
                         .step = at::zeros({}, at::kFloat)});
    }
  }

  void step(double factor) {
    const torch::NoGradGuard no_grad;
    if (torch_) {
      torch_->param_groups()[0].options().set_lr(kLr * factor);
      torch_->step();
    }
    for (auto& state : states_) {
      const auto& gradient = state.parameter.grad();
      if (!gradient.defined()) continue;
      state.step += 1;
      if (algorithm_ == Algorithm::kAdamW) {
        at::_fused_adamw_({state.parameter}, {gradient}, {state.first}, {state.second}, {}, {state.step}, state.lr * factor, 0.9, 0.999,
                          state.weight_decay, kEps, /*amsgrad=*/false, /*maximize=*/false);
      } else {
        at::_fused_sgd_({state.parameter}, {gradient}, {state.first}, state.weight_decay, kMomentum, state.lr * factor, /*dampening=*/0,
                        /*nesterov=*/false, /*maximize=*/false, /*is_first_step=*/state.step.item<float>() == 1);
      }
    }
  }

 private:
  struct State {
    at::Tensor parameter;
    double lr;
    double weight_decay;
    at::Tensor first;
    at::Tensor second;
    at::Tensor step;
  };
  Algorithm algorithm_;
  std::vector<State> states_;
  std::unique_ptr<torch::optim::Optimizer> torch_;
};

// Training, whole or sharded.

struct Trace {
  std::vector<double> losses;           ///< Means over the ranks, of training and evaluation.
  std::vector<double> norms;            ///< Of clipped gradients, before.
  std::vector<NamedTensors> gradients;  ///< Of each step.
  NamedTensors parameters;              ///< After the last step.
};

class Trainee {
 public:
  explicit Trainee(const Case& c) : case_(c), model_(ModelBuilder(c.model).build()) {}
  virtual ~Trainee() = default;

  Trace train() {
    Trace trace;
    for (std::size_t s = 0; s < case_.steps.size(); ++s) {
      const auto& plan = case_.steps[s];
      before_step(s);
      if (plan.zero_grad) zero_grad();
      std::vector<at::Tensor> losses;
      const auto forward = [&] { losses.push_back(loss(index(s, losses.size()), plan.penalty)); };
      if (plan.graphs_at_once) {
        while (losses.size() < plan.sync.size()) forward();
      }
      for (std::size_t micro = 0; micro < plan.sync.size(); ++micro) {
        if (!plan.graphs_at_once) forward();
        if (plan.evaluate_between) trace.losses.push_back(evaluate(s));
        backward(losses[micro], plan.sync[micro]);
        trace.losses.push_back(mean_of_ranks(losses[micro]));
      }
      losses.clear();
      trace.gradients.push_back(gradients());
      if (plan.evaluate_before_update) trace.losses.push_back(evaluate(s));
      if (plan.clip) trace.norms.push_back(clip());
      optimizer_step(lr_factor(s));
      if (plan.write) write();
      if (plan.evaluate_after) trace.losses.push_back(evaluate(s));
    }
    trace.parameters = parameters();
    after_training();
    return trace;
  }

 protected:
  static std::uint64_t index(std::size_t step, std::size_t micro) { return 10 * step + micro; }

  double evaluate(std::size_t step) {
    const torch::NoGradGuard no_grad;
    return mean_of_ranks(loss(index(step, 9), /*penalty=*/false));
  }

  /// What weight clipping or an average of weights would do, on some of the parameters.
  void write() {
    const torch::NoGradGuard no_grad;
    for (auto& [name, parameter] : distinct_parameters(*model_)) {
      if (mixed(case_.seed + 1, name) % 3 == 0) parameter.mul_(0.9);
    }
  }

  virtual at::Tensor loss(std::uint64_t batch, bool penalty) = 0;
  virtual void backward(const at::Tensor& loss, bool sync) = 0;
  virtual double mean_of_ranks(const at::Tensor& loss) = 0;
  virtual void zero_grad() = 0;
  virtual NamedTensors gradients() = 0;
  virtual double clip() = 0;
  virtual void optimizer_step(double factor) = 0;
  virtual NamedTensors parameters() = 0;
  virtual void before_step(std::size_t) {}
  virtual void after_training() {}

  const Case& case_;
  std::shared_ptr<RandomModel> model_;
};

/// Plain LibTorch: nothing goes through the library.
class WholeTrainee : public Trainee {
 public:
  explicit WholeTrainee(const Case& c) : Trainee(c), parameters_(distinct_parameters(*model_)), optimizer_(c, parameters_) {}

 protected:
  at::Tensor loss(std::uint64_t batch, bool penalty) override {
    at::Tensor mean;
    for (std::int64_t part = 0; part < case_.ranks; ++part) {
      const auto term = model_->loss(make_batch(case_, batch, part), penalty) / case_.ranks;
      mean = mean.defined() ? mean + term : term;
    }
    return mean;
  }
  void backward(const at::Tensor& loss, bool) override { loss.backward(); }
  double mean_of_ranks(const at::Tensor& loss) override { return loss.item<double>(); }
  void zero_grad() override {
    for (auto& [name, parameter] : parameters_) parameter.mutable_grad() = at::Tensor();
  }
  NamedTensors gradients() override {
    NamedTensors gradients;
    for (const auto& [name, parameter] : parameters_) {
      gradients.emplace_back(name, parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    }
    return gradients;
  }
  double clip() override {
    double squares = 0;
    for (const auto& [name, parameter] : parameters_) {
      if (parameter.grad().defined()) squares += parameter.grad().to(at::kDouble).square().sum().item<double>();
    }
    const double norm = std::sqrt(squares);
    if (norm > kMaxNorm) {
      for (const auto& [name, parameter] : parameters_) {
        if (parameter.grad().defined()) parameter.grad().mul_(kMaxNorm / (norm + 1e-6));
      }
    }
    return norm;
  }
  void optimizer_step(double factor) override { optimizer_.step(factor); }
  NamedTensors parameters() override {
    NamedTensors values;
    for (const auto& [name, parameter] : parameters_) values.emplace_back(name, parameter.detach().clone());
    return values;
  }

 private:
  NamedTensors parameters_;
  WholeOptimizer optimizer_;
};

class ShardedTrainee : public Trainee {
 public:
  ShardedTrainee(const Case& c, const Settings& settings, const fsdp::DeviceMesh& mesh)
      : Trainee(c), settings_(settings), mesh_(mesh), handle_(shard()), optimizer_(sharded_optimizer(c, *model_)) {}

 protected:
  FSDPModule shard() {
    fsdp::FullyShardOptions options{.mesh = mesh_,
                                    .placements = fsdp::Placements::from_name(settings_.strategy),
                                    .reshard_after_forward = settings_.reshard_after_forward,
                                    .prefetch_depth = settings_.prefetch_depth};
    options.units = [this](const std::string& name, const torch::nn::Module&) {
      return name.find("local") == std::string::npos && mixed(case_.seed + 2, name) % 100 < static_cast<std::uint64_t>(case_.percent_units);
    };
    if (case_.any_granularity) {
      options.granularity = [this](const std::string& name, const at::Tensor&) {
        const auto choice = mixed(case_.seed + 3, case_.uniform_granularity ? std::string_view("all") : name);
        switch (choice % 4) {
          case 0:
            return Granularity::element();
          case 1:
            return Granularity::rows();
          case 2:
            return Granularity::blocks(static_cast<std::int64_t>(1 + choice / 4 % 12));
          default:
            return Granularity::whole();
        }
      };
    }
    return fsdp::fully_shard(*model_, std::move(options));
  }

  at::Tensor loss(std::uint64_t batch, bool penalty) override { return model_->loss(make_batch(case_, batch, mesh_.rank()), penalty); }

  void backward(const at::Tensor& loss, bool sync) override {
    handle_.set_requires_gradient_sync(sync);
    loss.backward();
    const auto memory = handle_.memory_stats();
    EXPECT_EQ(memory.communication.live, 0) << "after backward";
    if (sync) EXPECT_EQ(memory.unreduced_gradients.live, 0) << "after a synchronized backward";
    if (settings_.strategy == "optim_grads_params") EXPECT_EQ(memory.gathered_parameters.live, 0) << "after backward";
  }

  double mean_of_ranks(const at::Tensor& loss) override { return mesh_.sum(loss.item<double>()) / case_.ranks; }
  void zero_grad() override { optimizer_->zero_grad(); }
  NamedTensors gradients() override { return handle_.full_gradients(); }
  double clip() override { return fsdp::clip_grad_norm(*model_, kMaxNorm); }
  void optimizer_step(double factor) override {
    optimizer_->set_lr_factor(factor);
    optimizer_->step();
  }
  NamedTensors parameters() override { return handle_.full_parameters(); }

  void before_step(std::size_t step) override {
    const auto failure = case_.steps[step].failure;
    if (failure != Failure::kNone) fail(step, failure);
    if (settings_.disturbance == 0) return;
    Random random(mixed(settings_.disturbance, step));
    const auto& engine = handle_.engine();
    for (std::size_t unit = 0; unit < engine->units().size(); ++unit) {
      if (random.chance(20)) FSDPModule(engine, unit).unshard();
      if (random.chance(20)) FSDPModule(engine, unit).reshard();
    }
    handle_.set_prefetch_depth(static_cast<int>(random.below(4)));
    handle_.set_reshard_after_forward(random.chance(50));
    if (random.chance(30)) handle_.reset();
  }

  /// A pass that throws half-way must leave no trace but gradients, which zero_grad() drops.
  void fail(std::size_t step, Failure failure) {
    handle_.set_requires_gradient_sync(true);
    auto batch = make_batch(case_, index(step, 8), mesh_.rank());
    batch.failure = failure;
    EXPECT_THROW(model_->loss(batch, /*penalize_input_gradient=*/false).backward(), std::runtime_error);
  }

  /// The parameters are ordinary tensors again, with the values that they had.
  void after_training() override {
    const double before = evaluate(0);
    const auto expected = handle_.full_parameters();
    fsdp::fully_unshard(*model_);
    const auto actual = distinct_parameters(*model_);
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      EXPECT_EQ(actual[i].first, expected[i].first);
      EXPECT_TRUE(torch::equal(actual[i].second, expected[i].second)) << "unsharded: " << actual[i].first;
    }
    EXPECT_EQ(evaluate(0), before) << "unsharded";
  }

  Settings settings_;
  fsdp::DeviceMesh mesh_;
  FSDPModule handle_;
  std::unique_ptr<fsdp::Optimizer> optimizer_;
};

// Comparison.

/// Largest absolute value; 0 if there is none.
double largest(const at::Tensor& tensor) { return tensor.numel() == 0 ? 0 : tensor.detach().abs().max().item<double>(); }

/// Names, presence, shapes, dtypes and values agree: exactly if `tolerance` is 0, else to `tolerance` times the scale of the tensor.
void expect_same(const NamedTensors& actual, const NamedTensors& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const auto& [name, value] = actual[i];
    const auto& reference = expected[i].second;
    ASSERT_EQ(name, expected[i].first) << what;
    ASSERT_EQ(value.defined(), reference.defined()) << what << ": " << name;
    if (!value.defined()) continue;
    ASSERT_EQ(value.sizes(), reference.sizes()) << what << ": " << name;
    ASSERT_EQ(value.scalar_type(), reference.scalar_type()) << what << ": " << name;
    const double difference = largest(value - reference);
    EXPECT_LE(difference, tolerance * largest(reference)) << what << ": " << name;
  }
}

void expect_same(const Trace& actual, const Trace& expected, double tolerance, double first_tolerance, const std::string& what) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size()) << what;
  for (std::size_t i = 0; i < actual.losses.size(); ++i) {
    EXPECT_NEAR(actual.losses[i], expected.losses[i], tolerance * std::abs(expected.losses[i])) << what << ": loss " << i;
  }
  ASSERT_EQ(actual.norms.size(), expected.norms.size()) << what;
  for (std::size_t i = 0; i < actual.norms.size(); ++i) {
    EXPECT_NEAR(actual.norms[i], expected.norms[i], tolerance * expected.norms[i]) << what << ": norm " << i;
  }
  for (std::size_t s = 0; s < actual.gradients.size(); ++s) {
    expect_same(actual.gradients[s], expected.gradients[s], s == 0 ? first_tolerance : tolerance,
                what + ", gradients of step " + std::to_string(s));
  }
  expect_same(actual.parameters, expected.parameters, tolerance, what + ", parameters");
}

/// The batch split changes the order of sums; training and the models' conditioning amplify that, by some 100 units of rounding as a rule
/// and by 2,100 in the worst of 480 such cases. What a fault changes is of the order of the gradients themselves.
double rounding(const Case& c) {
  const bool all_double = c.model.dtype == at::kDouble && !c.model.mixed_dtypes;
  return 4096 * (all_double ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon());
}

void check(const Case& c, const fsdp::DeviceMesh& mesh) {
  const auto first = ShardedTrainee(c, c.first, mesh).train();
  const auto second = ShardedTrainee(c, c.second, mesh).train();
  // The fused kernels round the last elements of a tensor, fewer than a vector register's, differently. Shards that are cut between any
  // elements end elsewhere than whole parameters.
  const bool same_ends = !c.any_granularity || (c.first.strategy != "no_shard" && c.second.strategy != "no_shard");
  expect_same(second, first, same_ends ? 0 : rounding(c), 0, c.second.strategy + " against " + c.first.strategy);
  // One rank of each case trains the reference: which one changes from case to case.
  if (mesh.rank() != static_cast<std::int64_t>(c.seed % static_cast<std::uint64_t>(c.ranks))) return;
  const auto whole = WholeTrainee(c).train();
  // The norm that gradients are clipped by is summed in another order than the reference's.
  const bool exact = c.ranks == 1 && c.sums_in_order();
  expect_same(first, whole, exact && !c.clips() ? 0 : rounding(c), exact ? 0 : rounding(c), c.first.strategy + " against whole");
}

/// What a rank that a signal ends (a hang's alarm, an abort, a crash) was doing.
std::string current_case;

void print_current_case(int signal) {
  [[maybe_unused]] const auto written = write(STDERR_FILENO, current_case.data(), current_case.size());
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

class Differential : public ::testing::TestWithParam<int> {};

TEST_P(Differential, RandomModels) {
  const auto begin = from_environment("FSDP_TEST_SEED", 1);
  const auto count = from_environment("FSDP_TEST_CASES", kCases);
  std::vector<std::uint64_t> seeds;
  for (auto seed = begin; seed < begin + count; ++seed) {
    if (ranks_of(seed) == GetParam()) seeds.push_back(seed);
  }
  if (seeds.empty()) GTEST_SKIP() << "no case with this number of ranks";
  const auto body = [&] {
    const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.timeout = std::chrono::seconds(30)});
    for (const int signal : {SIGABRT, SIGALRM, SIGBUS, SIGFPE, SIGSEGV}) std::signal(signal, print_current_case);
    for (const auto seed : seeds) {
      const auto c = make_case(seed);
      current_case = described(c) + "\n";
      SCOPED_TRACE(current_case);
      try {
        check(c, mesh);
      } catch (const std::exception& error) {
        throw std::runtime_error(current_case + error.what());
      }
    }
  };
  fsdp::testing::run_ranks(GetParam(), body, std::chrono::minutes(5));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Differential, ::testing::Values(1, 2, 3, 4), [](const auto& info) { return std::to_string(info.param); });

}  // namespace differential_test
