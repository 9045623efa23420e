#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "engine/engine.h"
#include "fsdp/optim.h"

namespace fsdp::optim {

/// The value of a hyperparameter, of the type that it has in torch.optim. std::monostate stands for None; pairs and lists stand for tuples.
using Setting = std::variant<std::monostate, bool, std::int64_t, double, std::string, std::pair<double, double>, std::vector<double>>;
using Settings = std::vector<std::pair<std::string, Setting>>;

/// A base learning rate, and the factor that a schedule gives.
struct LearningRate {
  double base = 0;
  double factor = 1;
  double now() const { return base * factor; }
  bool operator==(const LearningRate&) const = default;
};

/// A group of parameters, as torch.optim describes it.
struct GroupDescription {
  LearningRate lr;
  Settings settings;  ///< The settings, with the current "lr" among them.
  std::vector<std::string> parameters;
};

/// The settings that the parameters of one group share. Each algorithm uses some of them.
struct GroupSettings {
  LearningRate lr;
  double weight_decay = 0;
  std::tuple<double, double> betas = {0, 0};
  double eps = 0;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
};

/// The rules of an algorithm for the settings of its groups.
struct GroupRules {
  /// Returns the settings that torch.optim lists for a group, beside learning rate and weight decay.
  std::function<Settings(const GroupSettings& group)> describe;
  /// Throws Error for settings out of range.
  std::function<void(const GroupSettings& group)> validate;
};

/// Which parameters an algorithm updates, by unit and index.
using Selection = std::function<bool(const engine::Unit& unit, std::size_t parameter)>;

/// An algorithm's own settings, and those of the user's groups where they differ.
class Groups {
 public:
  /// Throws Error if a group has no predicate, or settings out of range.
  Groups(const GroupSettings& defaults, std::vector<ParamGroup> groups, GroupRules rules);
  std::size_t index_of(const std::string& parameter) const;
  const GroupSettings& operator[](std::size_t index) const { return settings_[index]; }
  std::size_t size() const { return settings_.size(); }
  /// Throws Error if out of range.
  void set_lr(std::size_t index, const LearningRate& lr);
  /// Sets the group's values of `settings`, except the learning rate. Throws Error for values out of range, and if a value that cannot be
  /// set differs from the present one.
  void restore(std::size_t index, const Settings& settings);
  /// Finds the groups of the parameters that the algorithm updates. Call it once. Throws Error if a group matches no parameter of the
  /// model, or that of such a parameter sets a value that the algorithm does not use.
  void take_in(const engine::Engine& engine, const Selection& updates);
  /// True if the group has parameters that take_in() has found.
  bool has_parameters(std::size_t index) const { return has_parameters_[index]; }
  /// Returns the groups as torch.optim describes them, with those of their parameters that `updates` accepts.
  std::vector<GroupDescription> describe(const engine::Engine& engine, const Selection& updates) const;

 private:
  void validate(const GroupSettings& group) const;

  std::vector<GroupSettings> settings_;  // the settings of each group; the defaults come first
  std::vector<bool> has_parameters_;
  std::vector<ParamGroup> groups_;
  GroupRules rules_;
};

/// The address of a setting, if it can be set.
using SettingPlace = std::variant<std::monostate, double*, bool*, std::tuple<double, double>*>;

/// Gives a group, whose settings are `own` now, the `saved` ones, except the learning rate. A setting without a place cannot be changed
/// after the optimizer was made. Throws Error, and sets nothing, if such a setting differs or a value is out of range. Settings that say
/// only how an update is computed (foreach, fused) may differ.
void restore(const Settings& own, const Settings& saved, const std::function<SettingPlace(const std::string& name)>& place_of);

/// Returns a text such as ", eps 1e-08"; nothing for None and False.
std::string shown(const std::string& name, const Setting& setting);

/// Throws Error(what) unless `holds` is true.
void require(bool holds, const std::string& what);

}  // namespace fsdp::optim
