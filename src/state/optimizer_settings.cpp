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

std::optional<double> number_of(const PythonValue& value) {
  if (const auto* whole = std::get_if<std::int64_t>(&value.value)) return static_cast<double>(*whole);
  if (const auto* real = std::get_if<double>(&value.value)) return *real;
  return std::nullopt;
}

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

}  // namespace

SavedGroups::SavedGroups(Source& source, std::string prefix) : source_(source), prefix_(std::move(prefix)) {
  for (const auto& name : source_.names()) {
    const auto last = name.rfind('.');
    if (!name.starts_with(prefix_) || last < prefix_.size()) continue;
    const auto key = name.substr(prefix_.size(), last - prefix_.size());
    names_[key].push_back(name.substr(last + 1));
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
  const auto flattened = names_.find(parameter);
  return flattened == names_.end() ? nullptr : &flattened->first;
}

std::optional<double> SavedGroups::number(const std::string& name) {
  if (!source_.has(name)) return std::nullopt;
  const auto tensor = source_.find(name);
  if (tensor && ckpt::numel(tensor->shape) == 1) return source_.read_whole(name).item<double>();
  return tensor ? std::nullopt : number_of(source_.read_object(name));
}

const SavedGroups::Group* SavedGroups::of(const std::string& parameter) {
  const auto* key = key_of(parameter);
  if (key == nullptr) return nullptr;
  const auto [found, is_new] = groups_.try_emplace(*key);
  auto& group = found->second;
  if (!is_new) return &group;
  for (const auto& setting : names_.at(*key)) {
    const auto name = prefix_ + *key + "." + setting;
    if (setting == "params") continue;
    if (!source_.find(name)) {
      group.settings[setting] = source_.read_object(name);
    } else if (const auto value = number(name)) {
      group.settings[setting] = {*value};
    }
  }
  const auto now = number(prefix_ + *key + ".lr");
  if (!now) throw Error(source_.path() + ": '" + prefix_ + *key + ".lr' is no number");
  const auto base = number(kBaseLr + *key);
  const auto factor = number(kGroupLrFactor + *key);
  const auto initial = number(prefix_ + *key + ".initial_lr");  // torch's schedules keep it
  if (base && factor) {
    group.lr = {.base = *base, .factor = *factor};
  } else if (initial && *initial != 0) {
    group.lr = {.base = *initial, .factor = *now / *initial};
  } else {
    group.lr = {.base = *now};
  }
  return &group;
}

std::optional<double> SavedGroups::lr_factor_of(const std::string& parameter) {
  const auto* key = key_of(parameter);
  if (key == nullptr) return std::nullopt;
  const auto [found, is_new] = factors_.try_emplace(*key);
  if (is_new) found->second = number(kGroupLrFactor + *key);
  return found->second;
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
      const SavedGroups::Group* common = nullptr;
      for (const auto& parameter : groups[g].parameters) {
        const auto* its = saved.of(saved_name(parameter));
        if (its == nullptr) {
          throw Error("optimizer_settings: the checkpoint has no settings of an optimizer for parameter '" + parameter +
                      "'; load without optimizer_settings");
        }
        if (common == nullptr) common = its;
        if (*its == *common) continue;
        throw Error("optimizer_settings: parameters '" + groups[g].parameters.front() + "' and '" + parameter +
                    "' are in one group here, but were saved with different settings; give the optimizer the groups that it had, or load "
                    "without optimizer_settings");
      }
      if (common == nullptr) continue;
      optim::Settings settings;
      for (const auto& [name, own] : groups[g].settings) {
        const auto found = common->settings.find(name);
        if (found != common->settings.end()) settings.emplace_back(name, setting_like(own, found->second));
      }
      algorithm->restore(g, settings);
      algorithm->set_lr(g, common->lr);
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
