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

/// A hyperparameter's value, of the type that torch.optim gives it; nothing is Python's None, pairs and lists are tuples.
using Setting = std::variant<std::monostate, bool, std::int64_t, double, std::string, std::pair<double, double>, std::vector<double>>;
using Settings = std::vector<std::pair<std::string, Setting>>;

/// A base learning rate, and the factor that a schedule gives.
struct LearningRate {
  double base = 0;
  double factor = 1;
  double now() const { return base * factor; }
  bool operator==(const LearningRate&) const = default;
};

/// A group as torch.optim describes it.
struct GroupDescription {
  LearningRate lr;
  Settings settings;  ///< "lr" among them, as it is now.
  std::vector<std::string> parameters;
};

/// The settings that parameters of one group share. An algorithm has some of them.
struct Group {
  LearningRate lr;
  double weight_decay = 0;
  std::tuple<double, double> betas = {0, 0};
  double eps = 0;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
};

/// Of an algorithm.
struct GroupRules {
  /// What torch.optim says of a group, beside learning rate and weight decay.
  std::function<Settings(const Group& group)> describe;
  /// Throws Error for settings out of range.
  std::function<void(const Group& group)> validate;
};

/// Which parameters an algorithm updates, by unit and index.
using Selection = std::function<bool(const engine::Unit& unit, std::size_t parameter)>;

/// An algorithm's own settings, and those of the user's groups where they differ.
class Groups {
 public:
  /// Throws Error if a group has no predicate, or settings out of range.
  Groups(const Group& defaults, std::vector<ParamGroup> groups, GroupRules rules);
  std::size_t index_of(const std::string& parameter) const;
  const Group& operator[](std::size_t index) const { return settings_[index]; }
  std::size_t size() const { return settings_.size(); }
  /// Throws Error if out of range.
  void set_lr(std::size_t index, const LearningRate& lr);
  /// Sets what is among `settings` but for the learning rate. Throws Error for values out of range, and where they differ from what cannot
  /// be set.
  void restore(std::size_t index, const Settings& settings);
  /// To be called once with the parameters that the algorithm updates. Throws Error if a group of one sets what the algorithm does not
  /// have.
  void take_in(const engine::Engine& engine, const Selection& updates);
  /// True for a group with parameters that were taken in.
  bool has_parameters(std::size_t index) const { return has_parameters_[index]; }
  /// As torch.optim describes them, with the parameters that `updates` says.
  std::vector<GroupDescription> describe(const engine::Engine& engine, const Selection& updates) const;

 private:
  void validate(const Group& group) const;

  std::vector<Group> settings_;  // the defaults first
  std::vector<bool> has_parameters_;
  std::vector<ParamGroup> groups_;
  GroupRules rules_;
};

/// Where a setting that can be set is.
using SettingPlace = std::variant<std::monostate, double*, bool*, std::tuple<double, double>*>;

/// Sets what is among the `saved` settings of a group, but for the learning rate; it has its `own` now. A setting without a place stays
/// what it was when the optimizer was made. Throws Error, and sets nothing, where such a one differs (unless it says only how an update is
/// computed: foreach, fused), or where a value is out of range.
void restore(const Settings& own, const Settings& saved, const std::function<SettingPlace(const std::string& name)>& place_of);

/// ", eps 1e-08"; nothing where torch.optim has None or False.
std::string shown(const std::string& name, const Setting& setting);

/// In as few digits as say which number it is.
std::string shortest(double value);

/// Throws Error(what) unless it holds.
void require(bool holds, const std::string& what);

}  // namespace fsdp::optim
