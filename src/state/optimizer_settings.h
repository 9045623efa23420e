#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "fsdp/optim.h"
#include "optim/shard_optimizer.h"
#include "state/source.h"

namespace fsdp::state {

/// Returns the name of a parameter in the saved optimizer.
using SavedName = std::function<std::string(const std::string& parameter)>;

/// The groups of parameters in a checkpoint. They are saved as a list of groups, each with the names of its parameters, or flattened, with
/// an item for each setting of each parameter.
class SavedGroups {
 public:
  /// `prefix` is the beginning of the names of settings, such as "optim.param_groups.". Throws Error.
  SavedGroups(Source& source, std::string prefix);

  bool has(const std::string& parameter) const { return key_of(parameter) != nullptr; }
  /// Returns the settings with these names of the parameters, which are one group's here. Parameters and settings that were not saved are
  /// left out. A name that ends in a dot (kBaseLr) stands for this library's own value. Throws Error if the parameters were saved with
  /// different settings.
  std::map<std::string, ckpt::PythonValue> common(const std::vector<std::string>& parameters, const std::vector<std::string>& settings,
                                                  const SavedName& saved_name);
  /// The factor of the learning rate of the group that has the parameter, if it was saved.
  std::optional<double> lr_factor_of(const std::string& parameter);

 private:
  const std::string* key_of(const std::string& parameter) const;
  /// Reads a value at most once; nothing if there is none, or a tensor that is no scalar.
  const std::optional<ckpt::PythonValue>& read(const std::string& name);
  std::optional<double> number(const std::string& name);

  Source& source_;
  std::string prefix_;
  std::set<std::string> keys_;                                      // of groups
  std::map<std::string, std::string> key_of_;                       // the key of the group, by parameter
  std::map<std::string, std::optional<ckpt::PythonValue>> values_;  // the values that were read, by name
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

/// Gives every group the settings with which its parameters were saved. Throws Error if its parameters were saved with different ones, or
/// if a setting can't be set.
void restore_settings(Optimizer& optimizer, SavedGroups& saved, const SavedName& saved_name);
/// Gives every group the learning-rate factor with which all its parameters were saved, or `factor` if there is none.
void restore_lr_factors(Optimizer& optimizer, double factor, SavedGroups& saved, const SavedName& saved_name);

}  // namespace fsdp::state
