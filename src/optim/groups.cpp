#include "optim/groups.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <type_traits>

#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::optim {
namespace {

/// Throws Error for negative values and NaN.
void require_not_negative(double value, const char* what) {
  if (!(value >= 0)) throw Error(std::string(what) + " " + std::to_string(value) + "; give 0 or more");
}

bool has(const Settings& settings, std::string_view name) {
  return std::any_of(settings.begin(), settings.end(), [&](const auto& setting) { return setting.first == name; });
}

/// Throws Error if a setting that can't be set differs.
void require_same(const std::string& name, const Setting& own, const Setting& saved) {
  constexpr std::array<std::string_view, 5> kHow = {"lr", "foreach", "fused", "capturable", "differentiable"};
  if (std::find(kHow.begin(), kHow.end(), name) != kHow.end() || own == saved) return;
  const auto text = [&](const Setting& setting) -> std::string {
    if (const auto* on = std::get_if<bool>(&setting)) return *on ? "true" : "false";
    const auto with_name = shown(name, setting);
    return with_name.empty() ? std::string("none") : with_name.substr(std::string_view(", ").size() + name.size() + 1);
  };
  throw Error("optimizer_settings: '" + name + "' was " + text(saved) + " when it was saved, and is " + text(own) +
              " here; it can't change later: make the optimizer with it, or load without optimizer_settings");
}

/// Throws Error if a number can't be set.
void require_settable(const std::string& name, double own, double saved) {
  if (name != "dampening") require_not_negative(saved, name.c_str());
  // The state exists only if momentum is not 0.
  if (name == "momentum" && (own != 0) != (saved != 0)) require_same(name, own, saved);
}

/// Calls `fn` with place and value if the place can take a value of this type.
template <typename Fn>
bool with_place(const SettingPlace& place, const Setting& value, const Fn& fn) {
  if (const auto* number = std::get_if<double*>(&place); number != nullptr && std::holds_alternative<double>(value)) {
    fn(**number, std::get<double>(value));
  } else if (const auto* on = std::get_if<bool*>(&place); on != nullptr && std::holds_alternative<bool>(value)) {
    fn(**on, std::get<bool>(value));
  } else if (const auto* pair = std::get_if<std::tuple<double, double>*>(&place);
             pair != nullptr && std::holds_alternative<std::pair<double, double>>(value)) {
    fn(**pair, std::tuple<double, double>(std::get<std::pair<double, double>>(value)));
  } else {
    return false;
  }
  return true;
}

}  // namespace

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(what);
}

std::string shown(const std::string& name, const Setting& setting) {
  struct Text {
    std::string operator()(std::monostate) const { return ""; }
    std::string operator()(bool on) const { return on ? " true" : ""; }
    std::string operator()(std::int64_t value) const { return std::string(" ").append(std::to_string(value)); }
    std::string operator()(double value) const { return std::string(" ").append(shortest(value)); }
    std::string operator()(const std::string& value) const { return std::string(" ").append(value); }
    std::string operator()(const std::pair<double, double>& value) const {
      return std::string(" ").append(shortest(value.first)).append(" ").append(shortest(value.second));
    }
    std::string operator()(const std::vector<double>& values) const {
      return values.empty() ? "" : std::string(" ").append(joined(values, " ", shortest));
    }
  };
  const auto text = std::visit(Text{}, setting);
  return text.empty() ? "" : std::string(", ").append(name).append(text);
}

void restore(const Settings& own, const Settings& saved, const std::function<SettingPlace(const std::string& name)>& place_of) {
  const auto check = [](const std::string& name) {
    return [name](const auto& now, const auto& then) {
      if constexpr (std::is_same_v<std::decay_t<decltype(now)>, double>) require_settable(name, now, then);
    };
  };
  const auto set = [](const std::string&) { return [](auto& now, const auto& then) { now = then; }; };
  const auto for_each = [&](const auto& action) {
    for (const auto& [name, value] : saved) {
      const auto found = std::find_if(own.begin(), own.end(), [&name = name](const auto& setting) { return setting.first == name; });
      if (found == own.end()) continue;
      if (!with_place(place_of(name), value, action(name))) require_same(name, found->second, value);
    }
  };
  for_each(check);
  for_each(set);
}

Groups::Groups(const GroupSettings& defaults, std::vector<ParamGroup> groups, GroupRules rules)
    : settings_{defaults}, groups_(std::move(groups)), rules_(std::move(rules)) {
  for (const auto& group : groups_) {
    if (!group.matches) throw Error("a ParamGroup without `matches`; give a predicate on the parameter's name");
    auto settings = defaults;
    settings.lr.base = group.lr.value_or(defaults.lr.base);
    settings.weight_decay = group.weight_decay.value_or(defaults.weight_decay);
    settings.betas = group.betas.value_or(defaults.betas);
    settings.eps = group.eps.value_or(defaults.eps);
    settings_.push_back(settings);
  }
  for (const auto& group : settings_) validate(group);
  has_parameters_.resize(settings_.size());
}

void Groups::validate(const GroupSettings& group) const {
  require_not_negative(group.lr.base, "learning rate");
  require_not_negative(group.weight_decay, "weight decay");
  rules_.validate(group);
}

std::size_t Groups::index_of(const std::string& parameter) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].matches(parameter)) return g + 1;
  }
  return 0;
}

void Groups::set_lr(std::size_t index, const LearningRate& lr) {
  require_not_negative(lr.base, "learning rate");
  settings_[index].lr = lr;
}

void Groups::restore(std::size_t index, const Settings& settings) {
  auto group = settings_[index];
  auto own = rules_.describe(group);
  own.emplace_back("weight_decay", group.weight_decay);
  optim::restore(own, settings, [&](const std::string& name) -> SettingPlace {
    if (name == "weight_decay") return &group.weight_decay;
    if (name == "betas") return &group.betas;
    if (name == "eps") return &group.eps;
    if (name == "momentum") return &group.momentum;
    if (name == "dampening") return &group.dampening;
    if (name == "nesterov") return &group.nesterov;
    return {};
  });
  validate(group);
  settings_[index] = group;
}

void Groups::take_in(const engine::Engine& engine, const Selection& updates) {
  std::string first;
  std::vector<bool> matches(groups_.size());
  for (const auto& unit : engine.units()) {
    for (const auto& parameter : unit->parameters) {
      if (first.empty()) first = parameter.name;
      for (std::size_t g = 0; g < groups_.size(); ++g) matches[g] = matches[g] || groups_[g].matches(parameter.name);
    }
  }
  if (const auto none = std::find(matches.begin(), matches.end(), false); none != matches.end()) {
    throw Error("ParamGroup " + std::to_string(none - matches.begin()) + " matches no parameter of the model, whose names are such as '" +
                first + "'");
  }
  const auto own = rules_.describe(settings_.front());
  for (const auto& unit : engine.units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      if (!updates(*unit, i)) continue;
      const auto index = index_of(unit->parameters[i].name);
      has_parameters_[index] = true;
      if (index == 0) continue;
      const auto& group = groups_[index - 1];
      for (const auto& [name, is_given] : {std::pair("betas", group.betas.has_value()), std::pair("eps", group.eps.has_value())}) {
        if (!is_given || has(own, name)) continue;
        throw Error(std::string("a ParamGroup sets ") + name + ", but its parameter '" + unit->parameters[i].name +
                    "' is updated by an algorithm that has none; leave it out, or match the parameter by another group");
      }
    }
  }
}

std::vector<GroupDescription> Groups::describe(const engine::Engine& engine, const Selection& updates) const {
  std::vector<GroupDescription> groups;
  for (const auto& group : settings_) {
    auto& description = groups.emplace_back();
    description.lr = group.lr;
    description.settings = {{"lr", group.lr.now()}, {"weight_decay", group.weight_decay}};
    const auto more = rules_.describe(group);
    description.settings.insert(description.settings.end(), more.begin(), more.end());
  }
  std::vector<std::pair<std::size_t, std::string>> ordered;
  for (const auto& unit : engine.units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      if (updates(*unit, i)) ordered.emplace_back(unit->parameters[i].position, unit->parameters[i].name);
    }
  }
  std::sort(ordered.begin(), ordered.end());
  for (auto& [position, name] : ordered) groups[index_of(name)].parameters.push_back(name);
  return groups;
}

}  // namespace fsdp::optim
