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

/// What a checkpoint says of groups of parameters: a list of them, each with its parameters' names, or flattened, with names of their own
/// for each parameter's settings.
class SavedGroups {
 public:
  /// `prefix`: how the names of settings begin, "optim.param_groups." for example. Throws Error.
  SavedGroups(Source& source, std::string prefix);

  struct Group {
    optim::LearningRate lr;
    std::map<std::string, ckpt::PythonValue> settings;
    bool operator==(const Group&) const = default;
  };
  bool has(const std::string& parameter) const { return key_of(parameter) != nullptr; }
  /// Of the group that has the parameter; null if none has. Throws Error.
  const Group* of(const std::string& parameter);
  /// The factor of that group's learning rate, if it was saved.
  std::optional<double> lr_factor_of(const std::string& parameter);

 private:
  const std::string* key_of(const std::string& parameter) const;
  std::optional<double> number(const std::string& name);

  Source& source_;
  std::string prefix_;
  std::map<std::string, std::vector<std::string>> names_;  // of settings, by the group's key
  std::map<std::string, std::string> key_of_;              // of the group, by parameter
  std::map<std::string, Group> groups_;                    // that were read
  std::map<std::string, std::optional<double>> factors_;   // the same
};

/// The settings of an optimizer's groups before a load, so that a failure can undo it.
class SettingsBefore {
 public:
  explicit SettingsBefore(Optimizer& optimizer);
  void undo();

 private:
  struct Before {
    optim::Part* part;
    std::size_t group;
    optim::GroupDescription description;
  };
  Optimizer& optimizer_;
  std::vector<Before> before_;
};

/// How a parameter is called in the checkpoint.
using SavedName = std::function<std::string(const std::string& parameter)>;

/// Gives every group the settings that its parameters were saved with. Throws Error where that is not one for all of them, or can't be set.
void restore_settings(Optimizer& optimizer, SavedGroups& saved, const SavedName& saved_name);
/// Gives every group `factor`, or the one that all its parameters were saved with.
void restore_lr_factors(Optimizer& optimizer, double factor, SavedGroups& saved, const SavedName& saved_name);

}  // namespace fsdp::state
