#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/after_error.h"
#include "base/any_strides.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "optim/shard_optimizer.h"
#include "state/extra.h"
#include "state/optimizer_settings.h"
#include "state/phases.h"
#include "state/snapshot.h"
#include "state/source.h"
#include "state/state_items.h"
#include "state/texts.h"

namespace fsdp {
namespace {

using state::CheckpointRanks;
using state::Fields;
using state::lines;
using state::StateItem;

// The beginnings of names.
constexpr std::string_view kModelPrefix = "model.";
constexpr std::string_view kOptimizerPrefix = "optim.";
constexpr std::string_view kExtraPrefix = "extra.";
constexpr std::string_view kRankExtraPrefix = "rank_extra.";
constexpr std::string_view kOwnPrefix = "fsdp.";

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const auto size : shape) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text.empty() ? "[]" : text + "]";
}

std::string rank_prefix(std::int64_t rank) { return std::string(kRankExtraPrefix) + std::to_string(rank) + "."; }

/// The values that a load takes from a checkpoint.
class Loading {
 public:
  Loading(const std::string& path, const LoadOptions& options, const CheckpointRanks& ranks)
      : source_(state::open_source(path)), transfer_(*source_), path_(path), options_(options), ranks_(ranks) {}

  std::string stored_key(const std::string& key) const {
    // `rename` gets only names of the model and the optimizer, not the library's own.
    if (!key.starts_with(kModelPrefix) && !key.starts_with(kOptimizerPrefix)) return key;
    auto name = options_.rename ? options_.rename(key) : key;
    for (const auto& [prefix, stored] : {std::pair(kModelPrefix, &options_.model_prefix), {kOptimizerPrefix, &options_.optimizer_prefix}}) {
      if (name.starts_with(prefix)) return *stored + name.substr(prefix.size());
    }
    return name;
  }
  /// Tells which checkpoint this is.
  std::string identity() const { return std::to_string(source_->saved()); }
  bool is_ignored(const std::string& name) const { return options_.ignore && options_.ignore(name); }
  bool has(const std::string& key) const { return source_->has(stored_key(key)); }

  /// Notes that this rank's values of a tensor will be read, or that they are missing. Reads nothing.
  void add(const StateItem& item) {
    const auto key = item.key();
    const auto stored = stored_key(key);
    if (is_ignored(key)) return;
    if (!source_->has(stored)) {
      missing_.push_back(key);
      return;
    }
    used_.insert(stored);
    replaced_.insert(key);
    const auto tensor = source_->find(stored);
    if (!tensor) {
      source_->read_object(stored);  // says why it cannot be read, if that is so
      throw Error(path_ + ": '" + stored + "' is no tensor");
    }
    if (tensor->shape != item.shape) {
      throw Error(path_ + ": '" + stored + "' has shape " + text_of(tensor->shape) + ", the model's has " + text_of(item.shape));
    }
    if (item.values.numel() > 0) transfer_.add(stored, item.box, item.offset, item.values);
  }

  /// Notes a name that other ranks may read.
  void expect(const std::string& key) {
    used_.insert(stored_key(key));
    if (!is_ignored(key) && has(key)) replaced_.insert(key);
  }

  /// A scalar's value.
  std::optional<double> number(const std::string& key) {
    const auto stored = stored_key(key);
    if (!source_->has(stored)) return std::nullopt;
    used_.insert(stored);
    const auto tensor = source_->find(stored);
    if (tensor && ckpt::numel(tensor->shape) == 1) return source_->read_whole(stored).item<double>();
    if (!tensor) {
      const auto value = source_->read_object(stored);
      if (const auto* whole = std::get_if<std::int64_t>(&value.value)) return static_cast<double>(*whole);
      if (const auto* real = std::get_if<double>(&value.value)) return *real;
    }
    throw Error(path_ + ": '" + stored + "' is no number");
  }

  /// Returns a text with the numbers of updates of the parameters, as far as the checkpoint has them. One rank reads them for all ranks,
  /// which then call take_counts().
  std::string read_counts(const std::vector<std::string>& parameters) {
    std::string text;
    for (const auto& parameter : parameters) {
      const auto key = std::string(kOptimizerPrefix) + "state." + parameter + ".step";
      if (is_ignored(key)) continue;
      if (const auto count = number(key)) text += parameter + '\0' + std::to_string(static_cast<std::int64_t>(*count)) + '\0';
    }
    return text;
  }
  void take_counts(const std::string& text) {
    for (Fields fields(text); !fields.at_end();) {
      const auto parameter = fields.next();
      counts_[parameter] = std::stoll(fields.next());
    }
  }

  /// Returns the number of updates of a parameter, by the counts that were taken. `kinds` are the kinds of state that its optimizer keeps.
  /// If the checkpoint does not say, the count is noted as missing, and the result is empty.
  std::optional<std::int64_t> updates(const std::string& parameter, const std::vector<optim::StateKind>& kinds) {
    const auto prefix = std::string(kOptimizerPrefix) + "state." + parameter + ".";
    if (is_ignored(prefix + "step")) return std::nullopt;
    const auto replaced_by = [&](std::int64_t count) {
      replaced_.insert(prefix + "step");
      if (count > 0) return count;
      for (const auto& kind : kinds) replaced_.insert(prefix + kind.name);  // there is no state then
      return count;
    };
    if (const auto count = counts_.find(parameter); count != counts_.end()) {
      expect(prefix + "step");
      return replaced_by(count->second);
    }
    const bool has_state = std::any_of(kinds.begin(), kinds.end(), [&](const auto& kind) { return has(prefix + kind.name); });
    // Torch's SGD and Muon keep no count, and this library's count for them only whether there was an update.
    const bool counts = kinds.size() > 1 || (kinds.size() == 1 && kinds.front().name != "momentum_buffer");
    if (has_state && !counts) return replaced_by(1);
    // This library writes a count of 0. Python writes nothing, but names all parameters that the optimizer had.
    if (kinds.empty() || (!has_state && !source_->has(state::kLrFactor) && had_optimizer(parameter))) return replaced_by(0);
    missing_.push_back(prefix + "step");
    return std::nullopt;
  }

  /// Finds names that were asked for and are missing, and names of the model (and the optimizer's state) in the checkpoint that were not
  /// asked for. Throws Error if strict.
  void check_names(bool with_optimizer) {
    for (const auto& name : source_->names()) {
      if (used_.contains(name) || is_ignored(name)) continue;
      if (name.starts_with(options_.optimizer_prefix + "state.") ? with_optimizer : is_of_model(name)) unexpected_.push_back(name);
    }
    if (!options_.strict || (missing_.empty() && unexpected_.empty())) return;
    std::string text = path_ + " does not fit the model" + other_model_prefixes();
    if (!missing_.empty()) text += "\n  missing in the checkpoint:" + lines(missing_);
    if (!unexpected_.empty()) text += "\n  not in the model:" + lines(unexpected_);
    throw Error(text + "\n  (LoadOptions::rename and the prefixes map names, ignore leaves some out, strict = false allows this)");
  }

  /// Throws Error unless this load replaces all values that an earlier load has replaced in part.
  void check_torn(const std::set<std::string>& torn) const {
    std::vector<std::string> kept;
    std::set_difference(torn.begin(), torn.end(), replaced_.begin(), replaced_.end(), std::back_inserter(kept));
    if (kept.empty()) return;
    throw Error("an earlier load failed halfway, and this one would keep values of it; load these, too:" + lines(kept));
  }

  /// Reads and checks all values that were added.
  void check_values() { transfer_.check(); }
  void assign() { transfer_.read(); }
  void assign_at_once() { transfer_.read_at_once(); }

  /// Returns the names that begin with `prefix` of all values that this load replaces on any rank.
  std::set<std::string> replaced(std::string_view prefix) const {
    std::set<std::string> names;
    std::copy_if(replaced_.begin(), replaced_.end(), std::inserter(names, names.end()),
                 [&](const std::string& name) { return name.starts_with(prefix); });
    return names;
  }

  ExtraState extra() { return state::extra_below(*source_, std::string(kExtraPrefix), options_.ignore); }

  /// Returns this rank's own values, if as many ranks saved theirs.
  ExtraState rank_extra() {
    const auto saved = source_->has(state::kRanks) ? number(state::kRanks) : std::nullopt;
    return saved && *saved == static_cast<double>(ranks_.size())
               ? state::extra_below(*source_, rank_prefix(ranks_.index()), options_.ignore)
               : ExtraState();
  }

  /// Returns this rank's generators with the states that they get, if as many ranks saved theirs.
  std::vector<std::pair<state::SavedGenerator, at::Tensor>> generators(c10::Device device) {
    std::vector<std::pair<state::SavedGenerator, at::Tensor>> found;
    if (!options_.rng) return found;
    for (auto& generator : state::generators_of(device)) {
      std::int64_t saved = 0;
      while (source_->has(generator.key(saved))) ++saved;
      if (saved != ranks_.size()) continue;
      const auto key = generator.key(ranks_.index());
      const auto values = source_->find(key) ? source_->read_whole(key) : at::Tensor();
      if (!values.defined() || !generator.takes(values)) throw Error(path_ + ": '" + key + "' is no state of this generator");
      found.emplace_back(generator, values);
    }
    return found;
  }

  /// Returns the state for the program's GradScaler. If it is missing, that is noted.
  std::optional<GradScalerState> grad_scaler() {
    const auto prefix = std::string(state::kScaler) + ".";
    if (options_.grad_scaler == nullptr) return std::nullopt;
    if (!has(prefix + "scale")) {
      missing_.push_back(prefix + "scale");
      return std::nullopt;
    }
    return state::grad_scaler_state([&](const std::string& name) {
      const auto key = prefix + name;
      if (!has(key)) throw Error(path_ + " has no '" + key + "'");
      return source_->read_object(stored_key(key));
    });
  }

  std::int64_t bytes() const { return transfer_.bytes(); }

  std::vector<std::string> take_missing() { return std::move(missing_); }
  std::vector<std::string> take_unexpected() { return std::move(unexpected_); }

  /// Restores the saved values of the optimizer's groups: all settings, or only the factors of learning rates.
  void restore_groups(Optimizer& optimizer) {
    const auto name = [this](const std::string& parameter) { return saved_name(parameter); };
    if (options_.optimizer_settings) {
      state::restore_settings(optimizer, groups(), name);
    } else if (has(state::kLrFactor)) {
      state::restore_lr_factors(optimizer, *number(state::kLrFactor), groups(), name);
    }
  }

  /// Throws Error unless the checkpoint has an optimizer's state.
  void require_optimizer(const engine::Engine& engine) const {
    const auto& names = source_->names();
    if (std::any_of(names.begin(), names.end(), [&](const auto& name) { return name.starts_with(options_.optimizer_prefix); })) return;
    std::set<std::string> prefixes;
    for (const auto& unit : engine.units()) {
      for (std::size_t i = 0; i < unit->parameters.size() && prefixes.empty(); ++i) {
        prefixes = state::prefixes_before(names, "state." + unit->parameters[i].name + ".");
      }
    }
    const auto advice = state::advice_on_prefixes(prefixes, "LoadOptions::optimizer_prefix");
    throw Error(path_ + " has no state of an optimizer below '" + options_.optimizer_prefix + "'" +
                (advice.empty() ? "; load the model alone, or pass strict = false" : advice));
  }

 private:
  /// Says where a checkpoint that lacks names of the model has the first of them.
  std::string other_model_prefixes() const {
    const auto first = std::find_if(missing_.begin(), missing_.end(), [](const auto& name) { return name.starts_with(kModelPrefix); });
    if (first == missing_.end()) return "";
    return state::advice_on_prefixes(state::prefixes_before(source_->names(), first->substr(kModelPrefix.size())),
                                     "LoadOptions::model_prefix");
  }
  /// Returns the saved optimizer's name of a parameter; empty if it is not known.
  std::string saved_name(const std::string& parameter) const {
    const auto states = options_.optimizer_prefix + "state.";
    const std::string_view count = ".step";
    const auto stored = stored_key(std::string(kOptimizerPrefix) + "state." + parameter + std::string(count));
    if (!stored.starts_with(states) || !stored.ends_with(count)) return "";
    return stored.substr(states.size(), stored.size() - states.size() - count.size());
  }
  state::SavedGroups& groups() {
    if (!groups_) groups_.emplace(*source_, options_.optimizer_prefix + "param_groups.");
    return *groups_;
  }
  /// If the model's names have no prefix, all tensors belong to the model whose names have no other known prefix.
  bool is_of_model(const std::string& name) const {
    if (!options_.model_prefix.empty()) return name.starts_with(options_.model_prefix);
    for (const std::string_view elses : {std::string_view(options_.optimizer_prefix), kExtraPrefix, kRankExtraPrefix, kOwnPrefix}) {
      if (name.starts_with(elses)) return false;
    }
    return source_->find(name).has_value();
  }

  /// Whether the optimizer that was saved had the parameter.
  bool had_optimizer(const std::string& parameter) {
    const auto name = saved_name(parameter);
    return !name.empty() && groups().has(name);
  }

  std::unique_ptr<state::Source> source_;
  state::Transfer transfer_;
  std::string path_;
  const LoadOptions& options_;
  const CheckpointRanks& ranks_;
  std::set<std::string> used_;      // in the checkpoint
  std::set<std::string> replaced_;  // in the model and the optimizer
  std::vector<std::string> missing_;
  std::vector<std::string> unexpected_;
  std::map<std::string, std::int64_t> counts_;  // the number of updates, by parameter
  std::optional<state::SavedGroups> groups_;    // the groups of the saved optimizer
};

/// The beginning of errors that leave a model torn.
constexpr const char* kNoLongerWhole =
    "the checkpoint was whole, but then could not be read any more; what was loaded of it is not all: load again";
constexpr const char* kHalfway = "the load ended halfway, and the model is partly loaded; until another load succeeds, it cannot be used:";

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

  std::string read(Loading& loading) const {
    std::vector<std::string> parameters;
    for (const auto& [parameter, before] : before_) parameters.push_back(parameter);
    return loading.read_counts(parameters);
  }
  /// Counts that the checkpoint does not have stay unchanged.
  void set(Loading& loading) {
    std::map<std::string, std::int64_t> steps;
    for (const auto& [parameter, before] : before_) {
      steps[parameter] = loading.updates(parameter, before.kinds).value_or(before.steps);
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

  void set(const std::function<std::int64_t(const std::string& parameter)>& steps) { state::set_optimizer_steps(optimizer_, steps); }

  Optimizer& optimizer_;
  std::map<std::string, Before> before_;
};

Loaded load_all(const std::string& path, torch::nn::Module& module, Optimizer* optimizer, const LoadOptions& options) {
  const torch::NoGradGuard no_grad;
  const auto engine = handle(module).engine();
  const CheckpointRanks ranks(*engine, CheckpointRanks::Groups::kOfMesh);
  std::optional<Loading> loading;
  std::optional<UpdateCounts> steps;
  std::string counts;  // the text of the numbers of updates
  std::optional<state::SettingsBefore> settings;
  std::vector<StateItem> copies;  // items whose values are then copied to their source tensors
  std::optional<GradScalerState> grad_scaler;
  std::vector<std::pair<state::SavedGenerator, at::Tensor>> generators;
  state::Phases phases(options.on_phase);
  // If nothing can be lost, one reading is enough.
  const bool at_once =
      ranks.all(options.strict && (!options.check_first || engine->main().may_be_lost()), "checkpoint: agreement on how it is read");
  Loaded loaded;
  try {
    ranks.together("nothing was loaded:", [&] {
      if (optimizer != nullptr && optimizer->engine() != engine) throw Error("load: the optimizer belongs to another model");
      engine->main().prepare_load();
      loading.emplace(path, options, ranks);
      for (const auto& item : state::model_items(module, state::kModel)) {
        loading->add(item);
        if (item.source.defined()) copies.push_back(item);
      }
      if (optimizer != nullptr) {
        if (options.strict) loading->require_optimizer(*engine);
        steps.emplace(*optimizer);
        settings.emplace(*optimizer);
        if (ranks.index() == 0) counts = steps->read(*loading);
      }
    });
    const auto told =
        ranks.broadcast(loading->identity() + '\0' + counts, "checkpoint: which one it is, and exchange of numbers of updates");
    ranks.together("nothing was loaded:", [&] {
      if (told.substr(0, told.find('\0')) != loading->identity()) {  // One may have found a newer one, or opened it after it was replaced.
        throw Error(path + " is another checkpoint than rank 0 reads: give all ranks the same one, such as the path that rank 0 has found");
      }
      if (optimizer != nullptr) {
        loading->take_counts(told.substr(told.find('\0') + 1));
        steps->set(*loading);
        for (const auto& item : state::optimizer_items(*optimizer, state::kOptimizer)) loading->add(item);
        for (const auto& key : state::optimizer_keys(*optimizer, state::kOptimizer)) loading->expect(key);
        loading->restore_groups(*optimizer);
      }
      grad_scaler = loading->grad_scaler();
      loading->check_names(optimizer != nullptr);
      loading->check_torn(engine->main().torn());
      if (optimizer != nullptr) loading->check_torn(optimizer->state().torn);
      loaded.extra = loading->extra();
      loaded.rank_extra = loading->rank_extra();
      if (loading->has(state::kMetric)) loaded.metric = loading->number(state::kMetric);
      generators = loading->generators(engine->options().device());
      phases.end(Phase::kOpen, 0);
      if (!at_once) loading->check_values();
      phases.end(Phase::kCheck, at_once ? 0 : loading->bytes());
    });
  } catch (...) {
    if (steps) steps->undo();
    if (settings) settings->undo();
    throw;
  }
  engine->main().set_torn(loading->replaced(kModelPrefix));
  if (optimizer != nullptr) optimizer->state().torn.merge(loading->replaced(kOptimizerPrefix));
  ranks.together(at_once ? kHalfway : kNoLongerWhole, [&] {
    try {
      at_once ? loading->assign_at_once() : loading->assign();
      for (const auto& copy : copies) assign_values(copy.source, copy.values);
    } catch (...) {
      after_error([&] { engine->main().changed(); });
      throw;
    }
    engine->main().changed();
    phases.end(Phase::kAssign, loading->bytes());
  });
  engine->main().set_torn({});
  if (optimizer != nullptr) optimizer->state().torn.clear();
  for (auto& [generator, values] : generators) generator.set_state(values);
  if (grad_scaler) options.grad_scaler->load_state_dict(*grad_scaler);
  loaded.path = path;
  loaded.rng = !generators.empty();
  loaded.missing = loading->take_missing();
  loaded.unexpected = loading->take_unexpected();
  return loaded;
}

}  // namespace

Loaded load(const std::string& path, torch::nn::Module& module, LoadOptions options) { return load_all(path, module, nullptr, options); }

Loaded load(const std::string& path, torch::nn::Module& module, Optimizer& optimizer, LoadOptions options) {
  return load_all(path, module, &optimizer, options);
}

std::vector<ExtraState> read_rank_extra(const std::string& path) {
  const torch::NoGradGuard no_grad;
  const auto source = state::open_source(path);
  std::vector<ExtraState> all;
  if (!source->has(state::kRanks)) return all;
  const auto saved = source->read_object(state::kRanks);
  const auto* ranks = std::get_if<std::int64_t>(&saved.value);
  if (ranks == nullptr || *ranks < 0) throw Error(path + ": '" + state::kRanks + "' is no number of ranks");
  for (std::int64_t rank = 0; rank < *ranks; ++rank) all.push_back(state::extra_below(*source, rank_prefix(rank)));
  return all;
}

}  // namespace fsdp
