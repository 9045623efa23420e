#include "state/load_plan.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "base/after_error.h"
#include "base/any_strides.h"
#include "base/text.h"
#include "checkpoint/commit.h"
#include "fsdp/error.h"
#include "state/texts.h"

namespace fsdp::state {
namespace {

// The beginnings of names that are neither the model's nor the optimizer's.
constexpr std::array<std::string_view, 3> kOtherPrefixes = {"extra.", "rank_extra.", "fsdp."};

/// The beginning of errors that leave a model torn.
constexpr const char* kNoLongerWhole = "the checkpoint was intact, but then could no longer be read; it is partly loaded: load again";
constexpr const char* kHalfway = "the load ended halfway, and the model is partly loaded; until another load succeeds, it cannot be used:";

std::string name_of_count(const std::string& parameter) { return std::string(kOptimizerPrefix) + "state." + parameter + ".step"; }

template <typename Names>
std::string packed(const Names& names) {
  std::string text;
  for (const auto& name : names) text += name + '\0';
  return text;
}

}  // namespace

LoadPlan::LoadPlan(const std::string& path, LoadOptions options, HeldStep* held)
    : options_(std::move(options)),
      phases_(options_.on_phase),
      held_(held),
      source_(held == nullptr ? open_source(path) : open_source(path, [held](const std::string& file) { return held->path_of(file); })),
      transfer_(*source_) {}

void LoadPlan::fetch() {
  if (held_ != nullptr) held_->fetch(transfer_.needed());
}

std::string LoadPlan::stored_key(const std::string& key) const {
  // `rename` gets only names of the model and the optimizer, not the library's own.
  if (!key.starts_with(kModelPrefix) && !key.starts_with(kOptimizerPrefix)) return key;
  auto name = options_.rename ? options_.rename(key) : key;
  for (const auto& [prefix, stored] : {std::pair(kModelPrefix, &options_.model_prefix), {kOptimizerPrefix, &options_.optimizer_prefix}}) {
    if (name.starts_with(prefix)) return *stored + name.substr(prefix.size());
  }
  return name;
}

bool LoadPlan::begin(const std::string& key, const std::string& from) {
  if (is_ignored(from)) return false;
  if (!has(from)) {
    missing_.insert(key);
    return false;
  }
  expect(from);
  replaced_.insert(key);
  return true;
}

void LoadPlan::expect_elsewhere(const std::string& key) {
  expect(key);
  if (!is_ignored(key) && has(key)) replaced_.insert(key);
}

void LoadPlan::add(const StateItem& item, const std::vector<std::string>& aliases) {
  auto from = item.key();
  for (const auto& alias : aliases) {
    expect(alias);
    if (!has(from) && has(alias)) from = alias;
  }
  if (!begin(item.key(), from)) return;
  const auto stored = stored_key(from);
  const auto tensor = source_->find(stored);
  if (!tensor) {
    source_->read_object(stored);  // says why it cannot be read, if that is so
    throw Error(source_->path() + ": '" + stored + "' is no tensor");
  }
  if (tensor->shape != item.shape) {
    throw Error(source_->path() + ": '" + stored + "' has shape " + in_brackets(tensor->shape) + ", the model's has " +
                in_brackets(item.shape));
  }
  if (item.values.numel() > 0) transfer_.add(stored, item.box, item.offset, item.values);
  if (item.source.defined()) copies_.push_back(item);
}

std::optional<ckpt::PythonValue> LoadPlan::scalar(const std::string& key) {
  const auto stored = stored_key(key);
  if (!source_->has(stored)) return std::nullopt;
  used_.insert(stored);
  auto value = source_->read_scalar(stored);
  if (!value) throw Error(source_->path() + ": '" + stored + "' is no number");
  return value;
}

std::optional<double> LoadPlan::number(const std::string& key) {
  const auto value = scalar(key);
  if (!value) return std::nullopt;
  const auto number = number_of(*value);
  if (!number) throw Error(source_->path() + ": '" + stored_key(key) + "' is no number");
  return number;
}

bool LoadPlan::has_optimizer(const std::vector<std::string>& parameters) const {
  const auto& names = source_->names();
  if (std::any_of(names.begin(), names.end(), [&](const auto& name) { return name.starts_with(options_.optimizer_prefix); })) return true;
  if (!options_.strict) return false;
  std::set<std::string> prefixes;
  for (std::size_t i = 0; i < parameters.size() && prefixes.empty(); ++i) {
    prefixes = prefixes_before(names, "state." + parameters[i] + ".");
  }
  const auto advice = advice_on_prefixes(prefixes, "optimizer_prefix");
  throw Error(source_->path() + " has no state of an optimizer below '" + options_.optimizer_prefix + "'" +
              (advice.empty() ? "; load the model alone, or turn strict off" : advice));
}

/// Returns the saved optimizer's name of a parameter; empty if it is not known.
std::string LoadPlan::saved_name(const std::string& parameter) const {
  const auto states = options_.optimizer_prefix + "state.";
  constexpr std::string_view kCount = ".step";
  const auto stored = stored_key(name_of_count(parameter));
  if (!stored.starts_with(states) || !stored.ends_with(kCount)) return "";
  return stored.substr(states.size(), stored.size() - states.size() - kCount.size());
}

SavedGroups& LoadPlan::groups() {
  if (!groups_) groups_.emplace(*source_, options_.optimizer_prefix + "param_groups.");
  return *groups_;
}

bool LoadPlan::was_left_out(const std::string& parameter) {
  const auto name = saved_name(parameter);
  return !source_->has(kLrFactor) && !name.empty() && groups().has(name);
}

std::map<std::string, bool> LoadPlan::updated(const std::vector<std::string>& parameters) {
  const auto parent = [](const std::string& name) { return name.substr(0, name.rfind('.')); };
  std::set<std::string> with_state;
  for (const auto& name : source_->names()) {
    if (!name.ends_with(".step")) with_state.insert(parent(name));
  }
  std::map<std::string, bool> updated;
  for (const auto& parameter : parameters) {
    const auto count = name_of_count(parameter);
    auto& its = updated[parameter] = is_ignored(count) || with_state.contains(parent(stored_key(count)));
    if (its) continue;
    const auto updates = number(count);
    its = updates ? *updates != 0 : !was_left_out(parameter);
  }
  return updated;
}

void LoadPlan::restore_groups(Optimizer& optimizer) {
  const auto name = [this](const std::string& parameter) { return saved_name(parameter); };
  if (options_.optimizer_settings) {
    restore_settings(optimizer, groups(), name);
  } else if (has(kLrFactor)) {
    restore_lr_factors(optimizer, *number(kLrFactor), groups(), name);
  }
}

std::map<std::string, ckpt::PythonValue> LoadPlan::settings(const std::vector<std::string>& parameters,
                                                            const std::vector<std::string>& names) {
  return groups().common(parameters, names, [this](const std::string& parameter) { return saved_name(parameter); });
}

std::map<std::string, ckpt::PythonValue> LoadPlan::grad_scaler(const std::vector<std::string>& names) {
  const auto prefix = std::string(kScaler) + ".";
  std::map<std::string, ckpt::PythonValue> state;
  if (!has(prefix + "scale")) {
    missing_.insert(prefix + "scale");
    return state;
  }
  for (const auto& name : names) {
    auto value = scalar(prefix + name);
    if (!value) throw Error(source_->path() + " has no '" + prefix + name + "'");
    state.emplace(name, *std::move(value));
  }
  return state;
}

void LoadPlan::require_identity(const std::string& of_rank0) const {
  if (of_rank0 == identity()) return;
  throw Error(source_->path() +
              " is another checkpoint than rank 0 reads: give all ranks the same one, such as the path that rank 0 has found");
}

void LoadPlan::join_names(const CheckpointRanks& ranks) {
  const std::array<std::set<std::string>*, 3> sets = {&used_, &replaced_, &missing_};
  std::string own = identity() + '\0';
  for (const auto* names : sets) own += packed(*names) + '\0';
  const auto of_rank0 = ranks.broadcast(own, "checkpoint: which one it is, and its names on rank 0");
  ranks.together(kNothingLoaded, [&] { require_identity(of_rank0.substr(0, of_rank0.find('\0'))); });
  // Usually, all ranks have the same names. They differ with pipeline parallelism.
  if (ranks.all(own == of_rank0, "checkpoint: agreement on names")) return;
  for (const auto& text : ranks.gather_everywhere(own, "checkpoint: names")) {
    Fields fields(text);
    fields.next();
    for (auto* names : sets) {
      for (auto name = fields.next(); !name.empty(); name = fields.next()) names->insert(std::move(name));
    }
  }
}

/// If the model's names have no prefix, all tensors belong to the model whose names have no other known prefix.
bool LoadPlan::is_of_model(const std::string& name) const {
  if (!options_.model_prefix.empty()) return name.starts_with(options_.model_prefix);
  if (name.starts_with(options_.optimizer_prefix)) return false;
  return std::none_of(kOtherPrefixes.begin(), kOtherPrefixes.end(), [&](auto prefix) { return name.starts_with(prefix); }) &&
         source_->find(name).has_value();
}

/// Returns the names of the model and the optimizer's state in the checkpoint that no rank has asked for.
std::vector<std::string> LoadPlan::unexpected(bool with_optimizer) const {
  std::vector<std::string> names;
  for (const auto& name : source_->names()) {
    if (used_.contains(name) || is_ignored(name)) continue;
    if (name.starts_with(options_.optimizer_prefix + "state.") ? with_optimizer : is_of_model(name)) names.push_back(name);
  }
  return names;
}

/// Returns this rank's generators with the states that they get, if as many ranks saved theirs.
std::vector<std::pair<SavedGenerator, at::Tensor>> LoadPlan::find_generators(c10::Device device, const CheckpointRanks& ranks) const {
  std::vector<std::pair<SavedGenerator, at::Tensor>> found;
  if (!options_.rng) return found;
  for (auto& generator : generators_of(device)) {
    std::int64_t saved = 0;
    while (source_->has(generator.key(saved))) ++saved;
    if (saved != ranks.size()) continue;
    const auto key = generator.key(ranks.index());
    const auto values = source_->find(key) ? source_->read_whole(key) : at::Tensor();
    if (!values.defined() || !generator.takes(values)) throw Error(source_->path() + ": '" + key + "' is no state of this generator");
    found.emplace_back(generator, values);
  }
  return found;
}

Loaded LoadPlan::check_names(const CheckpointRanks& ranks, const LoadTarget& target) {
  Loaded loaded;
  loaded.path = source_->path();
  loaded.missing.assign(missing_.begin(), missing_.end());
  loaded.unexpected = unexpected(target.has_optimizer);
  if (options_.strict && !(loaded.missing.empty() && loaded.unexpected.empty())) {
    std::string text = source_->path() + " does not fit the model";
    const auto first = std::find_if(missing_.begin(), missing_.end(), [](const auto& name) { return name.starts_with(kModelPrefix); });
    if (first != missing_.end()) {
      text += advice_on_prefixes(prefixes_before(source_->names(), first->substr(kModelPrefix.size())), "model_prefix");
    }
    if (!loaded.missing.empty()) text += "\n  missing in the checkpoint:" + lines(loaded.missing);
    if (!loaded.unexpected.empty()) text += "\n  not in the model:" + lines(loaded.unexpected);
    throw Error(text + "\n  (rename and the prefixes map names, ignore leaves some out, and turning strict off allows this)");
  }
  std::vector<std::string> kept;
  std::set_difference(target.torn.begin(), target.torn.end(), replaced_.begin(), replaced_.end(), std::back_inserter(kept));
  if (!kept.empty()) {
    throw Error("an earlier load failed halfway, and this one would keep values of it; load these, too:" + lines(kept));
  }
  loaded.metric = number(kMetric);
  generators_ = find_generators(target.device, ranks);
  loaded.rng = !generators_.empty();
  return loaded;
}

void LoadPlan::check_data(bool at_once) {
  at_once_ = at_once;
  phases_.end(Phase::kOpen, 0);
  if (!at_once_) transfer_.check();
  phases_.end(Phase::kCheck, at_once_ ? 0 : transfer_.bytes());
}

void LoadPlan::assign(const CheckpointRanks& ranks, const std::function<void()>& changed) {
  ranks.together(at_once_ ? kHalfway : kNoLongerWhole, [&] {
    try {
      at_once_ ? transfer_.read_at_once() : transfer_.read();
      for (const auto& copy : copies_) assign_values(copy.source, copy.values);
    } catch (...) {
      after_error(changed);
      throw;
    }
    changed();
    phases_.end(Phase::kAssign, transfer_.bytes());
  });
  for (auto& [generator, values] : generators_) generator.set_state(values);
  ckpt::note_saved(source_->saved());
}

}  // namespace fsdp::state
