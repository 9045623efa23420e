// Loads a checkpoint into a sharded model of C++ and its optimizer: lists their values, and applies what the plan finds.

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "optim/shard_optimizer.h"
#include "state/extra.h"
#include "state/load_plan.h"
#include "state/optimizer_settings.h"
#include "state/snapshot.h"
#include "state/state_items.h"
#include "state/texts.h"

namespace fsdp {
namespace {

using state::CheckpointRanks;
using state::Fields;
using state::LoadPlan;

/// Sets the numbers of updates of an optimizer's parameters to those in the checkpoint, and keeps the former ones, so that a failure can
/// undo it.
class UpdateCounts {
 public:
  explicit UpdateCounts(Optimizer& optimizer) : optimizer_(optimizer) {
    for (const auto& algorithm : optimizer.state().algorithms) {
      for (const auto& unit : optimizer.engine()->units()) {
        for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
          if (algorithm->updates(*unit, i)) before_[unit->parameters[i].name] = {algorithm->steps(*unit, i), algorithm->kinds()};
        }
      }
    }
  }

  std::vector<std::string> parameters() const {
    std::vector<std::string> names;
    for (const auto& [parameter, before] : before_) names.push_back(parameter);
    return names;
  }

  /// Returns a text with the numbers of updates of the parameters, as far as the checkpoint has them. One rank reads them for all ranks.
  std::string read(LoadPlan& plan) const {
    std::string text;
    for (const auto& [parameter, before] : before_) {
      const auto key = below_state(parameter) + "step";
      if (plan.is_ignored(key)) continue;
      if (const auto count = plan.number(key)) text += parameter + '\0' + std::to_string(static_cast<std::int64_t>(*count)) + '\0';
    }
    return text;
  }
  /// Sets the counts that read() has returned. Those that the checkpoint does not have stay unchanged.
  void set(LoadPlan& plan, const std::string& text) {
    std::map<std::string, std::int64_t> counts;
    for (Fields fields(text); !fields.at_end();) {
      const auto parameter = fields.next();
      counts[parameter] = std::stoll(fields.next());
    }
    std::map<std::string, std::int64_t> steps;
    for (const auto& [parameter, before] : before_) {
      const auto count = counts.find(parameter);
      steps[parameter] = updates(plan, parameter, before.kinds, count == counts.end() ? nullptr : &count->second).value_or(before.steps);
    }
    set([&](const std::string& parameter) { return steps.at(parameter); });
  }
  void undo() {
    set([this](const std::string& parameter) { return before_.at(parameter).steps; });
  }

 private:
  struct Before {
    std::int64_t steps = 0;
    std::vector<optim::StateKind> kinds;
  };

  static std::string below_state(const std::string& parameter) { return std::string(state::kOptimizerPrefix) + "state." + parameter + "."; }

  /// Returns the number of updates of a parameter whose optimizer keeps these kinds of state. `stored` is the count in the checkpoint, or
  /// null. If the checkpoint does not have the number, it is listed as missing, and the result is empty.
  static std::optional<std::int64_t> updates(LoadPlan& plan, const std::string& parameter, const std::vector<optim::StateKind>& kinds,
                                             const std::int64_t* stored) {
    const auto prefix = below_state(parameter);
    if (plan.is_ignored(prefix + "step")) return std::nullopt;
    const auto replaced_by = [&](std::int64_t count) {
      plan.note_replaced(prefix + "step");
      if (count > 0) return count;
      for (const auto& kind : kinds) plan.note_replaced(prefix + kind.name);  // there is no state then
      return count;
    };
    if (stored != nullptr) {
      plan.expect(prefix + "step");
      return replaced_by(*stored);
    }
    const bool has_state = std::any_of(kinds.begin(), kinds.end(), [&](const auto& kind) { return plan.has(prefix + kind.name); });
    // Torch's SGD and Muon keep no count, and this library's count for them only whether there was an update.
    const bool counts = kinds.size() > 1 || (kinds.size() == 1 && kinds.front().name != "momentum_buffer");
    if (has_state && !counts) return replaced_by(1);
    if (kinds.empty() || (!has_state && plan.was_left_out(parameter))) return replaced_by(0);
    plan.note_missing(prefix + "step");
    return std::nullopt;
  }

  void set(const std::function<std::int64_t(const std::string& parameter)>& steps) { state::set_optimizer_steps(optimizer_, steps); }

  Optimizer& optimizer_;
  std::map<std::string, Before> before_;
};

std::set<std::string> beginning(const std::set<std::string>& names, std::string_view prefix) {
  std::set<std::string> found;
  std::copy_if(names.begin(), names.end(), std::inserter(found, found.end()), [&](const auto& name) { return name.starts_with(prefix); });
  return found;
}

/// Returns the saved state of a GradScaler, if there is one.
std::optional<GradScalerState> read_scaler(LoadPlan& plan) {
  std::vector<std::string> names;
  for (const auto& [name, value] : state::values_of(GradScalerState())) names.push_back(name);
  const auto values = plan.grad_scaler(names);
  if (values.empty()) return std::nullopt;
  const auto number = [&](const std::string& name) {
    const auto value = state::number_of(values.at(name));
    if (!value) throw Error("the GradScaler's '" + name + "' is no number in the checkpoint");
    return *value;
  };
  const GradScalerState state = {.scale = number("scale"),
                                 .growth_factor = number("growth_factor"),
                                 .backoff_factor = number("backoff_factor"),
                                 .growth_interval = static_cast<std::int64_t>(number("growth_interval")),
                                 .growth_tracker = static_cast<std::int64_t>(number("_growth_tracker"))};
  GradScaler().load_state_dict(state);  // throws if the state is invalid
  return state;
}

}  // namespace

Loaded state::load_all(const std::string& path, torch::nn::Module& module, Optimizer* optimizer, const LoadOptions& options,
                       HeldStep* held) {
  const at::NoGradGuard no_grad;
  const auto engine = handle(module).engine();
  const CheckpointRanks ranks(*engine, CheckpointRanks::Groups::kOfMesh);
  std::optional<LoadPlan> plan;
  std::optional<UpdateCounts> steps;
  std::string counts;  // the text of the numbers of updates
  std::optional<state::SettingsBefore> settings;
  std::optional<GradScalerState> grad_scaler;
  Loaded loaded;
  // If nothing can be lost, one reading is enough.
  const bool at_once =
      ranks.all(options.strict && (!options.check_first || engine->main().may_be_lost()), "checkpoint: agreement on how it is read");
  try {
    ranks.together(state::kNothingLoaded, [&] {
      if (optimizer != nullptr && optimizer->engine() != engine) throw Error("load: the optimizer belongs to another model");
      engine->main().prepare_load();
      plan.emplace(path, options, held);
      for (const auto& item : state::model_items(module, state::kModel)) plan->add(item);
      if (options.grad_scaler != nullptr) grad_scaler = read_scaler(*plan);
      if (optimizer != nullptr) {
        steps.emplace(*optimizer);
        settings.emplace(*optimizer);
        plan->has_optimizer(steps->parameters());
        if (ranks.index() == 0) counts = steps->read(*plan);
      }
    });
    const auto of_rank0 =
        ranks.broadcast(plan->identity() + '\0' + counts, "checkpoint: which one it is, and exchange of numbers of updates");
    state::LoadTarget target = {.device = engine->options().device(), .torn = engine->main().torn()};
    const auto check = [&] {
      loaded = plan->check_names(ranks, target);
      loaded.extra = state::extra_below(plan->source(), state::kExtraPrefix, options.ignore);
      if (state::saved_ranks(plan->source()) == ranks.size()) {
        loaded.rank_extra = state::extra_below(plan->source(), state::rank_extra_prefix(ranks.index()), options.ignore);
      }
      plan->check_data(at_once);
    };
    ranks.together(state::kNothingLoaded, [&] {
      const auto end = of_rank0.find('\0');
      plan->require_identity(of_rank0.substr(0, end));
      if (optimizer != nullptr) {
        target.has_optimizer = true;
        target.torn.insert(optimizer->state().torn.begin(), optimizer->state().torn.end());
        steps->set(*plan, of_rank0.substr(end + 1));
        for (const auto& item : state::optimizer_items(*optimizer, state::kOptimizer)) plan->add(item);
        for (const auto& key : state::optimizer_keys(*optimizer, state::kOptimizer)) plan->expect_elsewhere(key);
        plan->restore_groups(*optimizer);
      }
      if (held == nullptr) check();
    });
    if (held != nullptr) {
      plan->fetch();
      ranks.together(state::kNothingLoaded, check);
    }
  } catch (...) {
    if (steps) steps->undo();
    if (settings) settings->undo();
    throw;
  }
  engine->main().set_torn(beginning(plan->replaced(), state::kModelPrefix));
  if (optimizer != nullptr) optimizer->state().torn.merge(beginning(plan->replaced(), state::kOptimizerPrefix));
  plan->assign(ranks, [&] {
    engine->main().send_values();
    engine->main().changed();
  });
  engine->main().set_torn({});
  if (optimizer != nullptr) optimizer->state().torn.clear();
  if (grad_scaler) options.grad_scaler->load_state_dict(*grad_scaler);
  return loaded;
}

Loaded load(const std::string& path, torch::nn::Module& module, LoadOptions options) {
  return state::load_all(path, module, nullptr, options);
}

Loaded load(const std::string& path, torch::nn::Module& module, Optimizer& optimizer, LoadOptions options) {
  return state::load_all(path, module, &optimizer, options);
}

std::vector<ExtraState> read_rank_extra(const std::string& path) {
  const at::NoGradGuard no_grad;
  const auto source = state::open_source(path);
  std::vector<ExtraState> all;
  const auto ranks = state::saved_ranks(*source);
  for (std::int64_t rank = 0; rank < ranks; ++rank) all.push_back(state::extra_below(*source, state::rank_extra_prefix(rank)));
  return all;
}

}  // namespace fsdp
