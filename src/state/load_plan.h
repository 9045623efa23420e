#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/python_value.h"
#include "fsdp/save_load.h"
#include "state/extra.h"
#include "state/memory_steps.h"
#include "state/optimizer_settings.h"
#include "state/phases.h"
#include "state/ranks.h"
#include "state/snapshot.h"
#include "state/source.h"
#include "state/state_items.h"

namespace fsdp::state {

// The beginnings of names.
inline constexpr std::string_view kModelPrefix = "model.";
inline constexpr std::string_view kOptimizerPrefix = "optim.";

/// The beginning of errors after which model and optimizer are unchanged.
inline constexpr const char* kNothingLoaded = "nothing was loaded:";

/// The model and the optimizer into which a checkpoint is loaded.
struct LoadTarget {
  c10::Device device = c10::kCPU;  ///< The device whose generator is restored.
  bool has_optimizer = false;
  std::set<std::string> torn;  ///< Names of values that an earlier load has replaced in part.
};

/// The load of a checkpoint on one rank. A front end (C++ or Python) first lists the tensors of its model and its optimizer, which changes
/// nothing. Then check_names() compares the names, and check_data() the data with their checksums. After all ranks have checked, assign()
/// reads the tensors to their places.
class LoadPlan {
 public:
  /// Opens the checkpoint: the one at `path`, or, unless it is null, a step in memory, which outlives this object. Throws Error.
  LoadPlan(const std::string& path, LoadOptions options, HeldStep* held = nullptr);

  /// Records that this rank's values of a tensor will be read, or that they are missing. `aliases` are other names that the checkpoint may
  /// have for it. Throws Error if the checkpoint has something else of this name.
  void add(const StateItem& item, const std::vector<std::string>& aliases = {});
  /// Records that a value will be replaced, or that it is missing. Returns whether it will be replaced.
  bool begin(const std::string& key) { return begin(key, key); }
  /// Records that a name is not unexpected.
  void expect(const std::string& key) { used_.insert(stored_key(key)); }
  /// Records that other ranks may replace a value.
  void expect_elsewhere(const std::string& key);
  void note_replaced(const std::string& key) { replaced_.insert(key); }
  void note_missing(const std::string& key) { missing_.insert(key); }

  bool is_ignored(const std::string& name) const { return options_.ignore && options_.ignore(name); }
  bool has(const std::string& key) const { return source_->has(stored_key(key)); }
  /// Returns a scalar's value, whether it is stored as a tensor or as a plain value; nothing if there is none. Throws Error for others.
  std::optional<ckpt::PythonValue> scalar(const std::string& key);
  std::optional<double> number(const std::string& key);
  /// Returns a tensor or a plain value. Throws Error.
  StoredValue value(const std::string& key) { return source_->read_value(stored_key(key)); }

  /// Returns whether the checkpoint has an optimizer's state. Throws Error if it has none, and strict. The parameters are for advice.
  bool has_optimizer(const std::vector<std::string>& parameters) const;
  /// Returns true if the saved optimizer had the parameter and wrote neither state nor a count because it had not updated it. Python's
  /// optimizers do so; C++'s write a count of 0.
  bool was_left_out(const std::string& parameter);
  /// Returns for each parameter false if the saved optimizer had it and has not updated it, so that the checkpoint has no state of it.
  std::map<std::string, bool> updated(const std::vector<std::string>& parameters);
  /// Gives the groups of an optimizer the saved settings, or only the factors of learning rates.
  void restore_groups(Optimizer& optimizer);
  /// Returns the saved values of a group's settings with these names. Throws Error if its parameters were saved with different ones.
  std::map<std::string, ckpt::PythonValue> settings(const std::vector<std::string>& parameters, const std::vector<std::string>& names);
  /// Returns the saved values of a GradScaler's state with these names. If there is none, that is noted as missing.
  std::map<std::string, ckpt::PythonValue> grad_scaler(const std::vector<std::string>& names);

  /// Returns the identity of the checkpoint.
  std::string identity() const { return std::to_string(source_->saved()); }
  /// Throws Error if rank 0 reads another checkpoint: a rank may have found a newer one, or opened it after it was replaced.
  void require_identity(const std::string& of_rank0) const;
  /// Joins the names of all ranks, for a front end whose ranks list different ones. Collective. Throws Error like require_identity().
  void join_names(const CheckpointRanks& ranks);
  /// Gets the data of the tensors that were added from other hosts, if they lie there in memory. Collective.
  void fetch();
  /// Throws Error unless the names fit, or the options allow the rest, and all torn values will be replaced. Returns the items beside
  /// model, optimizer and the program's own values; assign() restores the generators.
  Loaded check_names(const CheckpointRanks& ranks, const LoadTarget& target);
  /// Reads and checks all data; with `at_once`, assign() does that. Throws Error.
  void check_data(bool at_once);

  /// Returns the names of all values that assign() replaces on any rank.
  const std::set<std::string>& replaced() const { return replaced_; }
  /// Reads the tensors to their places, and calls `changed`, also if that fails. Then restores the generators. Collective. Throws Error on
  /// all ranks if it fails on one; the values of replaced() are then torn.
  void assign(const CheckpointRanks& ranks, const std::function<void()>& changed);

  Source& source() { return *source_; }
  /// Returns the values below a name that are not ignored. Throws Error.
  std::vector<StoredItem> items_below(const std::string& prefix) { return state::items_below(*source_, prefix, options_.ignore); }

 private:
  /// The value is that of the name `from` in the checkpoint.
  bool begin(const std::string& key, const std::string& from);
  std::string stored_key(const std::string& key) const;
  std::string saved_name(const std::string& parameter) const;
  bool is_of_model(const std::string& name) const;
  SavedGroups& groups();
  std::vector<std::string> unexpected(bool with_optimizer) const;
  std::vector<std::pair<SavedGenerator, at::Tensor>> find_generators(c10::Device device, const CheckpointRanks& ranks) const;

  LoadOptions options_;
  Phases phases_;
  HeldStep* held_;
  std::unique_ptr<Source> source_;
  Transfer transfer_;
  std::vector<StateItem> copies_;   // items whose values are copied to their source tensors
  bool at_once_ = false;            // whether one reading is enough
  std::set<std::string> used_;      // names in the checkpoint
  std::set<std::string> replaced_;  // names in the model and the optimizer
  std::set<std::string> missing_;
  std::optional<SavedGroups> groups_;
  std::vector<std::pair<SavedGenerator, at::Tensor>> generators_;  // with the states that they get
};

/// Loads the checkpoint at `path`, or, unless it is null, a step in memory. `optimizer` may be null. Collective. Throws Error.
Loaded load_all(const std::string& path, torch::nn::Module& module, Optimizer* optimizer, const LoadOptions& options,
                HeldStep* held = nullptr);

}  // namespace fsdp::state
