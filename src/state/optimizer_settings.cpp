#include "state/optimizer_settings.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <variant>

#include "fsdp/error.h"
#include "state/snapshot.h"

namespace fsdp::state {
namespace {

using ckpt::PythonValue;

std::optional<std::vector<double>> numbers_of(const PythonValue& value) {
  const auto* tuple = std::get_if<PythonValue::Tuple>(&value.value);
  const auto* list = std::get_if<PythonValue::List>(&value.value);
  if (tuple == nullptr && list == nullptr) return std::nullopt;
  std::vector<double> numbers;
  for (const auto& item : tuple != nullptr ? tuple->items : list->items) {
    const auto number = number_of(item);
    if (!number) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

/// A saved value of the type of `own`, if it has one: Python writes whole numbers for real ones. Else as a text, which differs.
optim::Setting setting_like(const optim::Setting& own, const PythonValue& saved) {
  if (std::holds_alternative<double>(own)) {
    if (const auto number = number_of(saved)) return *number;
  }
  if (const auto numbers = numbers_of(saved)) {
    if (std::holds_alternative<std::vector<double>>(own)) return *numbers;
    if (std::holds_alternative<std::pair<double, double>>(own) && numbers->size() == 2) return std::pair((*numbers)[0], (*numbers)[1]);
  }
  return std::visit(
      [&](const auto& typed) -> optim::Setting {
        using T = std::decay_t<decltype(typed)>;
        if constexpr (std::is_constructible_v<optim::Setting, std::in_place_type_t<T>>) {
          return typed;
        } else {
          return ckpt::repr(saved);
        }
      },
      saved.value);
}

/// Whether values are equal; whole and real numbers may be.
bool equal(const PythonValue& a, const PythonValue& b) {
  const auto number = number_of(a);
  return number ? number == number_of(b) : a == b;
}

optim::LearningRate learning_rate(const std::map<std::string, PythonValue>& settings) {
  const auto number = [&](const std::string& name) {
    const auto found = settings.find(name);
    return found == settings.end() ? std::nullopt : number_of(found->second);
  };
  const auto now = number("lr");
  if (!now) throw Error("optimizer_settings: the checkpoint has a group without a learning rate; load without optimizer_settings");
  const auto base = number(kBaseLr);
  const auto factor = number(kGroupLrFactor);
  if (base && factor) return {.base = *base, .factor = *factor};
  const auto initial = number("initial_lr");  // torch's schedules keep it
  if (initial && *initial != 0) return {.base = *initial, .factor = *now / *initial};
  return {.base = *now};
}

}  // namespace

SavedGroups::SavedGroups(Source& source, std::string prefix) : source_(source), prefix_(std::move(prefix)) {
  for (const auto& name : source_.names()) {
    const auto last = name.rfind('.');
    if (!name.starts_with(prefix_) || last < prefix_.size()) continue;
    const auto key = name.substr(prefix_.size(), last - prefix_.size());
    keys_.insert(key);
    if (!name.ends_with(".params") || source_.find(name)) continue;
    const auto listed = source_.read_object(name);
    const auto* list = std::get_if<PythonValue::List>(&listed.value);
    if (list == nullptr) continue;
    for (const auto& item : list->items) {
      if (const auto* text = std::get_if<std::string>(&item.value)) key_of_.emplace(*text, key);
      if (const auto* index = std::get_if<std::int64_t>(&item.value)) key_of_.emplace(std::to_string(*index), key);
    }
  }
}

const std::string* SavedGroups::key_of(const std::string& parameter) const {
  if (const auto listed = key_of_.find(parameter); listed != key_of_.end()) return &listed->second;
  const auto flattened = keys_.find(parameter);
  return flattened == keys_.end() ? nullptr : &*flattened;
}

const std::optional<PythonValue>& SavedGroups::read(const std::string& name) {
  const auto [found, is_new] = values_.try_emplace(name);
  if (is_new && source_.has(name)) found->second = source_.find(name) ? source_.read_scalar(name) : source_.read_object(name);
  return found->second;
}

std::optional<double> SavedGroups::number(const std::string& name) {
  const auto& value = read(name);
  return value ? number_of(*value) : std::nullopt;
}

std::map<std::string, PythonValue> SavedGroups::common(const std::vector<std::string>& parameters, const std::vector<std::string>& settings,
                                                       const SavedName& saved_name) {
  std::map<std::string, PythonValue> found;
  std::set<std::string> seen;  // the keys of groups
  for (const auto& parameter : parameters) {
    const auto* key = key_of(saved_name(parameter));
    if (key == nullptr || !seen.insert(*key).second) continue;
    for (const auto& setting : settings) {
      const auto& value = read(setting.ends_with('.') ? setting + *key : prefix_ + *key + "." + setting);
      if (!value) continue;
      const auto& first = found.emplace(setting, *value).first->second;
      if (equal(first, *value)) continue;
      throw Error("optimizer_settings: parameters '" + parameters.front() + "' and '" + parameter +
                  "' are in one group here, but were saved with different settings (" + setting + ": " + ckpt::repr(first) + " and " +
                  ckpt::repr(*value) + "); give the optimizer the groups that it had, or load without optimizer_settings");
    }
  }
  return found;
}

std::optional<double> SavedGroups::lr_factor_of(const std::string& parameter) {
  const auto* key = key_of(parameter);
  return key == nullptr ? std::nullopt : number(kGroupLrFactor + *key);
}

SettingsBefore::SettingsBefore(Optimizer& optimizer) : optimizer_(optimizer) {
  for (const auto& algorithm : optimizer.state().algorithms) {
    const auto groups = algorithm->groups();
    for (std::size_t g = 0; g < groups.size(); ++g) before_.push_back({algorithm.get(), g, groups[g]});
  }
}

void SettingsBefore::undo() {
  for (const auto& [algorithm, group, description] : before_) {
    algorithm->restore(group, description.settings);
    algorithm->set_lr(group, description.lr);
  }
  optimizer_.state().settings_changed();
}

void restore_settings(Optimizer& optimizer, SavedGroups& saved, const SavedName& saved_name) {
  for (const auto& algorithm : optimizer.state().algorithms) {
    const auto groups = algorithm->groups();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const auto& parameters = groups[g].parameters;
      if (parameters.empty()) continue;
      for (const auto& parameter : parameters) {
        if (saved.has(saved_name(parameter))) continue;
        throw Error("optimizer_settings: the checkpoint has no settings of an optimizer for parameter '" + parameter +
                    "'; load without optimizer_settings");
      }
      std::vector<std::string> names = {"lr", "initial_lr", kBaseLr, kGroupLrFactor};
      for (const auto& [name, own] : groups[g].settings) names.push_back(name);
      const auto common = saved.common(parameters, names, saved_name);
      optim::Settings settings;
      for (const auto& [name, own] : groups[g].settings) {
        if (const auto found = common.find(name); found != common.end()) settings.emplace_back(name, setting_like(own, found->second));
      }
      algorithm->restore(g, settings);
      algorithm->set_lr(g, learning_rate(common));
    }
  }
  optimizer.state().settings_changed();
}

void restore_lr_factors(Optimizer& optimizer, double factor, SavedGroups& saved, const SavedName& saved_name) {
  for (const auto& algorithm : optimizer.state().algorithms) {
    const auto groups = algorithm->groups();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const auto& parameters = groups[g].parameters;
      const auto saved_factor = [&](const std::string& parameter) { return saved.lr_factor_of(saved_name(parameter)); };
      const auto first = parameters.empty() ? std::nullopt : saved_factor(parameters.front());
      const bool is_common =
          std::all_of(parameters.begin(), parameters.end(), [&](const auto& parameter) { return saved_factor(parameter) == first; });
      algorithm->set_lr(g, {.base = groups[g].lr.base, .factor = is_common ? first.value_or(factor) : factor});
    }
  }
}

}  // namespace fsdp::state
