#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/optim.h"
#include "optim/shard_optimizer.h"
#include "state/source.h"

namespace fsdp::state {

/// The groups of parameters in a checkpoint. They are saved as a list of groups, each with the names of its parameters, or flattened, with
/// an item for each setting of each parameter.
class SavedGroups {
 public:
  /// `prefix` is the beginning of the names of settings, such as "optim.param_groups.". Throws Error.
  SavedGroups(Source& source, std::string prefix);

  struct Group {
    optim::LearningRate lr;
    std::map<std::string, ckpt::PythonValue> settings;
    bool operator==(const Group&) const = default;
  };
  bool has(const std::string& parameter) const { return key_of(parameter) != nullptr; }
  /// Returns the settings of the group that has the parameter; null if no group has it. Throws Error.
  const Group* of(const std::string& parameter);
  /// The factor of that group's learning rate, if it was saved.
  std::optional<double> lr_factor_of(const std::string& parameter);

 private:
  const std::string* key_of(const std::string& parameter) const;
  std::optional<double> number(const std::string& name);

  Source& source_;
  std::string prefix_;
  std::map<std::string, std::vector<std::string>> names_;  // names of settings, by the group's key
  std::map<std::string, std::string> key_of_;              // the key of the group, by parameter
  std::map<std::string, Group> groups_;                    // the groups that were read, by key
  std::map<std::string, std::optional<double>> factors_;   // the factors that were read, by key
};

/// The settings of an optimizer's groups before a load, so that a failure can undo it.
class SettingsBefore {
 public:
  explicit SettingsBefore(Optimizer& optimizer);
  void undo();

 private:
  struct Before {
    optim::Algorithm* algorithm;
    std::size_t group;
    optim::GroupDescription description;
  };
  Optimizer& optimizer_;
  std::vector<Before> before_;
};

/// Returns a parameter's name in the checkpoint.
using SavedName = std::function<std::string(const std::string& parameter)>;

/// Gives every group the settings with which its parameters were saved. Throws Error if its parameters were saved with different ones, or
/// if a setting can't be set.
void restore_settings(Optimizer& optimizer, SavedGroups& saved, const SavedName& saved_name);
/// Gives every group the learning-rate factor with which all its parameters were saved, or `factor` if there is none.
void restore_lr_factors(Optimizer& optimizer, double factor, SavedGroups& saved, const SavedName& saved_name);

}  // namespace fsdp::state
