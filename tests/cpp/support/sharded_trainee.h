#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/model_builder.h"
#include "support/random_training.h"
#include "support/unkind_communicator.h"

namespace fsdp::testing {

/// The place of this rank among those of its mesh.
inline std::int64_t position_in(const DeviceMesh& mesh) {
  std::int64_t position = 0;
  for (const MeshDim& dim : mesh.dims()) position = position * dim.size + mesh.coordinate(dim.name);
  return position;
}

/// Meshes of all ranks, or of those of each tensor-parallel piece, in so many rows, made when they are first asked for: by all ranks at
/// once.
class Meshes {
 public:
  explicit Meshes(MeshOptions options) : options_(options) {}

  /// With `messages`, ranks share no memory.
  const DeviceMesh& in_rows(std::int64_t outer, bool unkind = false, std::int64_t pieces = 1, bool messages = false) {
    auto& mesh = made_[{outer, unkind, pieces, messages}];
    if (!mesh.defined()) {
      auto options = options_;
      if (messages) options.shared_memory = false;
      std::vector<MeshDim> dims{{"dp_shard", -1}};
      if (outer > 1) dims.insert(dims.begin(), {"dp_outer", outer});
      if (pieces == 1) {
        mesh = init_device_mesh("cpu", dims, options);
      } else {
        std::vector<std::string> names;
        for (const MeshDim& dim : dims) names.push_back(dim.name);
        dims.insert(dims.begin(), {"tp", pieces});
        const auto grid = init_device_mesh("cpu", dims, options);
        mesh = grid.sub(names);
        if (!pieces_.defined()) pieces_ = grid["tp"];
      }
      if (unkind) mesh = testing::unkind(mesh, {.seed = 1, .max_delay = std::chrono::microseconds(200)});
    }
    return mesh;
  }

  /// The ranks that have the other pieces of this one's model: undefined before there are such. Ranks that differ in rows alone have the
  /// same.
  const DeviceMesh& pieces() const { return pieces_; }

 private:
  MeshOptions options_;
  std::map<std::tuple<std::int64_t, bool, std::int64_t, bool>, DeviceMesh> made_;
  DeviceMesh pieces_;
};

/// Trains a random case with the library, on this rank.
class ShardedTrainee final : public Trainee {
 public:
  /// `pieces`: undefined if there is one. `folder`: all ranks', for what is saved.
  ShardedTrainee(const Case& c, const Settings& settings, const DeviceMesh& mesh, const DeviceMesh& pieces, std::string folder)
      : Trainee(c), mesh_(mesh), pieces_(pieces), rank_(position_in(mesh)), folder_(std::move(folder)) {
    attend_ = [](const torch::nn::Module& module, bool present) {
      if (!module.parameters().empty()) attend(module, present);
    };
    start(settings);
  }

 protected:
  void forward(std::size_t number, std::uint64_t batch, bool penalty) override {
    if (losses_.size() <= number) losses_.resize(number + 1);
    losses_[number] = loss(*model_, batch, rank_, penalty);
  }

  double backward(std::size_t number, const PassPlan& plan) override {
    handle_->set_requires_gradient_sync(plan.sync);
    handle_->set_requires_all_reduce(plan.all_reduce);
    handle_->set_is_last_backward(plan.is_last);
    losses_[number].backward();
    if (plan.is_last) {
      const auto memory = handle_->memory_stats();
      const bool keeps_lost = case_.grad_comm && case_.grad_comm->error_feedback;
      if (!keeps_lost) {
        EXPECT_EQ(memory.communication.live, 0) << "after backward";
      }
      if (plan.sync && plan.all_reduce) {
        EXPECT_EQ(memory.unreduced_gradients.live, 0) << "after a synchronized backward";
      }
      // What unshard() has gathered stays until it is used, and what only some ranks have, until a synchronized backward has ended.
      const bool keeps = settings_.disturbance != 0 || (case_.model.attending && !plan.sync);
      if (settings_.strategy == "optim_grads_params" && !settings_.hfsdp && !keeps) {
        EXPECT_EQ(memory.gathered_parameters.live, 0) << "after backward";
      }
    }
    return losses_[number].item<double>();
  }
  void drop_graphs() override { losses_.clear(); }

  Outcome failing_pass(std::uint64_t batch, const FailingPass& plan) override {
    handle_->set_requires_gradient_sync(plan.sync);
    handle_->set_requires_all_reduce(true);
    handle_->set_is_last_backward(true);
    auto outcome = Outcome::kFailedForward;
    try {
      const FailingOperator operators;
      const auto value = loss(*model_, batch, rank_, /*penalty=*/false, std::make_shared<Fuse>(plan.fuse, plan.operators));
      // What a forward armed fails in it: before a backward has used a parameter, the library knows of none.
      FailingOperator::disarm();
      outcome = Outcome::kFailedBackward;
      value.backward();
      outcome = Outcome::kCompleted;
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "planned failure");
    }
    // After a forward, reset() drops what backwards without synchronization have collected; the replicas do not follow that.
    if (plan.reset && outcome == Outcome::kFailedBackward) {
      handle_->reset();
      const auto memory = handle_->memory_stats();
      EXPECT_EQ(memory.communication.live, 0) << "after reset()";
      EXPECT_EQ(memory.unreduced_gradients.live, 0) << "after reset()";
      for (const auto& shard : handle_->gradient_shards()) EXPECT_FALSE(shard.value.defined()) << "after reset(): " << shard.name;
    }
    if (outcome == Outcome::kFailedBackward) drop_ignored_gradients();
    return outcome;
  }

  double evaluate(std::uint64_t batch) override {
    const torch::NoGradGuard no_grad;
    return loss(*model_, batch, rank_, /*penalty=*/false).item<double>();
  }

  void zero_grad() override {
    optimizer_->zero_grad();
    drop_ignored_gradients();
  }
  void scale(double factor) override { handle_->scale_gradients(factor); }

  NamedTensors gradients() override {
    auto gradients = handle_->full_gradients();
    for (const auto& [name, parameter] : ignored()) {
      gradients.emplace_back(name, parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    }
    return gradients;
  }

  double clip() override { return clip_grad_norm(*model_, kMaxNorm); }
  void optimizer_step(double factor) override {
    optimizer_->set_lr_factor(factor);
    optimizer_->step();
  }

  void write() override {
    const torch::NoGradGuard no_grad;
    for (auto& [name, parameter] : distinct_parameters(*model_)) {
      if (is_written(name)) parameter.mul_(0.9);
    }
  }

  NamedTensors parameters() override {
    auto values = handle_->full_parameters();
    for (const auto& [name, parameter] : ignored()) values.emplace_back(name, parameter.detach().clone());
    return values;
  }

  void before_step(std::size_t step) override {
    if (settings_.disturbance == 0) return;
    Random random(mixed(settings_.disturbance, step));
    const auto& engine = handle_->engine();
    for (std::size_t unit = 0; unit < engine->units().size(); ++unit) {
      if (random.chance(20)) FSDPModule(engine, unit).unshard();
      if (random.chance(20)) FSDPModule(engine, unit).reshard();
    }
    handle_->set_prefetch_depth(static_cast<int>(random.below(4)));
    handle_->set_reshard_after_forward(random.chance(50));
    if (case_.steps[step].zero_grad && random.chance(30)) handle_->reset();
  }

  /// Saves, and goes on in a model that began with other values, sharded in another way.
  void reload(std::size_t step) override {
    const auto path = folder_ + "/" + std::to_string(step);
    save(path, *model_, *optimizer_);
    const auto kept = ignored();
    start(reloaded_settings(case_, settings_), /*shift=*/1);
    load(path, *model_, *optimizer_);
    const torch::NoGradGuard no_grad;
    for (const auto& [name, parameter] : ignored()) {
      for (const auto& [old_name, old] : kept) {
        if (name == old_name) at::Tensor(parameter).copy_(old);
      }
    }
  }

  /// The parameters are ordinary tensors again, with the values that they had.
  void after_training() override {
    const bool computes = !case_.has_policy;  // Otherwise its parameters are no longer of the dtype that it computes in.
    const double before = computes ? evaluate(1) : 0;
    const auto expected = parameters();
    fully_unshard(*model_);
    attend_ = {};
    for (const auto& [name, parameter] : distinct_parameters(*model_)) {
      const auto found = std::find_if(expected.begin(), expected.end(), [&, &name = name](const auto& one) { return one.first == name; });
      ASSERT_NE(found, expected.end()) << name;
      EXPECT_TRUE(at::allclose(parameter, found->second, 0, 0, /*equal_nan=*/true)) << "unsharded: " << name;
    }
    if (computes) {
      EXPECT_EQ(evaluate(1), before) << "unsharded";
    }
  }

 private:
  void start(const Settings& settings, double shift = 0) {
    settings_ = settings;
    // Of every other division: each parameter of a unit that encloses others is reduced by itself. Not where the order of sums is open: it
    // then is another where gradients are replicated, which are reduced as a whole.
    const bool alone = settings.division % 2 == 0 && case_.sums_in_order();
    engine::set_reduced_alone(alone ? 0 : std::int64_t{1} << 40);
    optimizer_.reset();
    const auto make = [&] { return ModelBuilder(case_.model).build(); };
    const bool has_values = settings.values != Values::kFromRank0 || rank_ == 0;
    model_ = settings.values == Values::kOwn || (has_values && settings.values == Values::kFromRank0)
                 ? make()
                 : deferred_init(make, {.draw = has_values});
    if (shift != 0) {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model_->parameters()) parameter.add_(shift);
    }
    handle_ = std::make_unique<FSDPModule>(shard());
    optimizer_ = library_optimizer(case_, *model_);
    list_prefetches();
  }

  FSDPModule shard() {
    FullyShardOptions options{.mesh = mesh_,
                              .placements = Placements::from_name(settings_.strategy),
                              .initial_values = settings_.values == Values::kFromRank0 ? InitialValues::kFromRank0 : InitialValues::kOwn,
                              .reshard_after_forward = settings_.reshard_after_forward,
                              .reshard_after_forward_size = settings_.reshard_after_forward_size,
                              .keep_gathered_bytes = settings_.keep_gathered_bytes,
                              .prefetch_depth = settings_.prefetch_depth,
                              .granularity = granularity_of(case_),
                              .offload = settings_.offload,
                              .report_nan_in_param_grad = settings_.report_nan,
                              .separate_reduce_group = settings_.separate_reduce_group};
    if (settings_.hfsdp) options.outer_placements = Placements::optim();
    const auto group = unit_group();
    if (!group.empty()) options.unit_groups = {group};
    options.units = [this, group](const std::string& name, const torch::nn::Module&) {
      if (name.ends_with("optional")) return true;
      return name.find("local") == std::string::npos && std::find(group.begin(), group.end(), name) == group.end() &&
             mixed(settings_.division, name) % 100 < static_cast<std::uint64_t>(settings_.percent_units);
    };
    options.grad_comm_format = case_.grad_comm;
    if (case_.ignoring) options.ignore = [this](const std::string& name, const at::Tensor&) { return is_ignored(case_, name); };
    if (case_.pieces > 1) {
      options.tensor_parallel = [pieces = pieces_](const std::string&, const at::Tensor&) { return TensorParallel{pieces, 0}; };
    }
    if (case_.has_policy) {
      options.mixed_precision = MixedPrecisionPolicy{.param_dtype = case_.precision.compute,
                                                     .main_grads_dtype = case_.precision.main_gradient,
                                                     .grad_comm_dtype = case_.precision.wire};
    }
    if (case_.float8) {
      const auto format = std::make_shared<const GatherFormat>(float8_blocks(kFloat8Block));
      options.gather_format = [this, format](const std::string& name, const at::Tensor&) {
        return is_gathered_in_float8(case_, name) ? format : nullptr;
      };
    }
    return fully_shard(*model_, std::move(options));
  }

  /// The first and the last of the model's outermost blocks.
  std::vector<std::string> unit_group() const {
    if (!settings_.unit_group) return {};
    std::vector<std::string> outermost;
    for (const auto& item : model_->named_modules()) {
      const auto& name = item.key();
      if ((name.starts_with("first.") || name.starts_with("second.")) && name.find('.') == name.rfind('.')) outermost.push_back(name);
    }
    if (outermost.size() < 2) return {};
    return {outermost.front(), outermost.back()};
  }

  void list_prefetches() {
    if (settings_.prefetch_lists == 0) return;
    Random random(settings_.prefetch_lists);
    const auto& engine = handle_->engine();
    const auto units = static_cast<std::int64_t>(engine->units().size());
    const auto some = [&] {
      std::vector<FSDPModule> list;
      for (auto count = 1 + random.below(3); count > 0; --count) {
        list.emplace_back(engine, static_cast<std::size_t>(random.below(units)));
      }
      return list;
    };
    for (std::size_t unit = 0; unit < engine->units().size(); ++unit) {
      if (random.chance(50)) FSDPModule(engine, unit).set_modules_to_forward_prefetch(some());
      if (random.chance(50)) FSDPModule(engine, unit).set_modules_to_backward_prefetch(some());
    }
  }

  std::vector<std::pair<std::string, at::Tensor>> ignored() const {
    std::vector<std::pair<std::string, at::Tensor>> parameters;
    for (const auto& [name, parameter] : distinct_parameters(*model_)) {
      if (is_ignored(case_, name)) parameters.emplace_back(name, parameter);
    }
    return parameters;
  }
  void drop_ignored_gradients() {
    for (auto& [name, parameter] : ignored()) at::Tensor(parameter).mutable_grad() = at::Tensor();
  }

  Settings settings_;
  DeviceMesh mesh_;
  DeviceMesh pieces_;
  std::int64_t rank_;
  std::string folder_;
  std::shared_ptr<RandomModel> model_;
  std::unique_ptr<FSDPModule> handle_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<at::Tensor> losses_;
};

}  // namespace fsdp::testing
