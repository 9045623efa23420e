#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fsdp/optim.h"
#include "optim/groups.h"

namespace fsdp {

namespace optim {

/// One kind of state that an algorithm keeps for each element of a parameter, or for every block of elements.
struct StateKind {
  std::string name;  ///< torch.optim's name, such as "exp_avg".
  std::int64_t elements_per_value = 1;
};

/// This rank's values of one kind of state for its part of a parameter (Unit::main_slice).
struct StateTensor {
  const engine::Unit* unit = nullptr;
  std::size_t parameter = 0;
  StateKind kind;
  at::Tensor values;  ///< 1-D, a view: ceil(numel / elements_per_value) of them.
};

/// An algorithm that updates some of a model's parameters. An optimizer consists of one or several, which divide the parameters among
/// themselves.
class Algorithm {
 public:
  virtual ~Algorithm() = default;
  virtual void step() = 0;
  /// Whether a step that is captured as a graph is right in each replay, because nothing in it depends on counts of the host.
  virtual bool can_be_captured() const { return false; }

  // The groups of parameters. The first one has the parameters that no ParamGroup matches.

  virtual std::size_t group_count() const = 0;
  /// Whether it updates parameters of the group.
  virtual bool has_parameters(std::size_t group) const = 0;
  virtual LearningRate lr(std::size_t group) const = 0;
  /// Throws Error if it is out of range.
  virtual void set_lr(std::size_t group, const LearningRate& lr) = 0;

  // For checkpoints.

  virtual const std::vector<StateKind>& kinds() const = 0;
  virtual bool updates(const engine::Unit& unit, std::size_t parameter) const = 0;
  /// The number of updates of a parameter. Only ranks that have a part of the parameter know it.
  virtual std::int64_t steps(const engine::Unit& unit, std::size_t parameter) const = 0;
  virtual void set_steps(const engine::Unit& unit, std::size_t parameter, std::int64_t steps) = 0;
  /// Returns the state of this rank's parts of parameters that have been updated. State that is missing (after set_steps) is made, as
  /// zeros.
  virtual std::vector<StateTensor> state() = 0;
  virtual std::vector<GroupDescription> groups() const = 0;
  /// Sets those of a group's `settings` that can be set later, except the learning rate. Throws Error if other settings differ.
  virtual void restore(std::size_t group, const Settings& settings) = 0;
};

/// The base class of this library's own algorithms.
class BuiltInAlgorithm : public Algorithm {
 public:
  std::size_t group_count() const final { return groups_.size(); }
  bool has_parameters(std::size_t group) const final { return groups_.has_parameters(group); }
  LearningRate lr(std::size_t group) const final { return groups_[group].lr; }
  void set_lr(std::size_t group, const LearningRate& lr) final { groups_.set_lr(group, lr); }
  const std::vector<StateKind>& kinds() const final { return kinds_; }
  std::vector<GroupDescription> groups() const final;
  void restore(std::size_t group, const Settings& settings) final { groups_.restore(group, settings); }

 protected:
  BuiltInAlgorithm(std::shared_ptr<engine::Engine> engine, Groups groups, std::vector<StateKind> kinds)
      : engine_(std::move(engine)), groups_(std::move(groups)), kinds_(std::move(kinds)) {}
  /// Returns updates() as a Selection.
  Selection selection() const;

  std::shared_ptr<engine::Engine> engine_;
  Groups groups_;

 private:
  std::vector<StateKind> kinds_;
};

/// Optimizer state, which is counted in the engine's accounting as long as it exists.
class StateMemory {
 public:
  explicit StateMemory(std::shared_ptr<engine::Engine> engine) : engine_(std::move(engine)) {}
  ~StateMemory();
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;
  /// Returns a 1-D tensor of zeros. It lies on the device of the unit's main parameters, or in host memory if the optimizer state is
  /// offloaded.
  at::Tensor zeros(const engine::Unit& unit, std::int64_t numel, at::ScalarType dtype);
  /// Runs `update`. Meanwhile the tensors of `state`, which zeros() has made, lie on the device of the unit's main parameters.
  void with_state(const engine::Unit& unit, std::vector<at::Tensor>& state, const std::function<void()>& update);

 private:
  std::shared_ptr<engine::Engine> engine_;
  std::int64_t device_bytes_ = 0;
  std::int64_t host_bytes_ = 0;
};

/// A range of a unit's main parameters whose parameters have the same group and number of updates. The fused kernels get it as one tensor.
struct Segment {
  const engine::Unit* unit = nullptr;
  std::size_t group = 0;
  at::Tensor value;
  at::Tensor gradient;
  std::vector<at::Tensor> state;  ///< As many as the optimizer keeps per element, each like value.
  at::Tensor step;                ///< 0-D fp32; the number of updates, incremented before each.
  std::int64_t updates = 0;       ///< The same number, for the host.
};

/// Runs the algorithm on the segments of a group.
using Update = std::function<void(const GroupSettings& group, double lr, std::vector<Segment*>& segments)>;

/// Exchanges 1-D CPU tensors. Returns every rank's values as [rank][value]. The ranks are those of the root unit's mesh, in the order of
/// their own pieces, so that sums over them are the same on every mesh of as many ranks, and those that hold other tensor-parallel pieces.
/// Collective.
at::Tensor exchange(const engine::Engine& engine, const at::Tensor& values, const char* operation);

/// An elementwise algorithm. Turns units into segments: parameters that have always had a gradient, and that fill whole vector registers
/// [Same tails], share a few long segments; the division changes only when the set of parameters with gradients changes.
class Elementwise final : public BuiltInAlgorithm {
 public:
  /// `selection` are the parameters that it updates, by default all.
  Elementwise(std::shared_ptr<engine::Engine> engine, Groups groups, std::vector<StateKind> kinds, Update update,
              const Selection& selection = {});
  ~Elementwise() override;
  void step() override;
  bool can_be_captured() const override { return true; }
  bool updates(const engine::Unit& unit, std::size_t parameter) const override;
  std::int64_t steps(const engine::Unit& unit, std::size_t parameter) const override;
  void set_steps(const engine::Unit& unit, std::size_t parameter, std::int64_t steps) override;
  std::vector<StateTensor> state() override;

 private:
  struct ParameterState {
    std::size_t group = 0;
    std::int64_t steps = 0;
    bool selected = true;
    bool active = false;  ///< Whether it is a part of a segment now.
  };
  /// This rank's part of a trainable parameter that is not empty.
  struct Piece {
    engine::Unit::MainSlice slice;
    std::size_t parameter;
  };
  /// The state for a range of a sub-buffer: for all of it, or for the range between parameters that are not selected.
  struct Stretch {
    std::size_t sub_buffer;
    std::int64_t begin;
    std::int64_t end;
    std::vector<at::Tensor> state;
  };
  struct UnitState {
    std::vector<ParameterState> parameters;
    std::vector<Stretch> stretches;
    std::vector<Segment> segments;
    bool allocated = false;
  };

  static std::vector<Piece> pieces_of(const engine::Unit& unit);
  void allocate(const engine::Unit& unit, UnitState& state);
  void divide(const engine::Unit& unit, UnitState& state);
  static void count_step(UnitState& state, int by);
  void tell_replays(std::vector<std::size_t> updated);

  Update update_;
  StateMemory memory_;
  std::vector<UnitState> units_;
  std::uint64_t divisions_ = 0;  // How often segments were made, or thrown away.
  const std::shared_ptr<bool> exists_ = std::make_shared<bool>(true);
};

/// AdamW through ATen's fused kernel. Throws Error if an option is out of range. The groups are described with `more` settings, those of
/// the optimizer to which this belongs.
std::unique_ptr<Algorithm> adamw(std::shared_ptr<engine::Engine> engine, const AdamWOptions& options, const std::vector<ParamGroup>& groups,
                                 const Selection& selection = {}, const Settings& more = {});

/// Returns the rules of torch.optim.AdamW, for groups that also have `more` settings.
GroupRules adam_rules(const Settings& more);
GroupSettings adam_defaults(const AdamWOptions& options);

/// Returns the groups of an optimizer that has these algorithms, without empty ones. If two describe a group in the same way, each updates
/// some of its parameters (AdamW8bit: the large ones, and the rest), and the group is listed once.
std::vector<GroupDescription> describe_groups(const std::vector<std::unique_ptr<Algorithm>>& algorithms);

}  // namespace optim

/// The state of an optimizer. By default, it consists of this library's own algorithms.
struct Optimizer::State {
  explicit State(torch::nn::Module& module);
  virtual ~State() = default;

  virtual void step();
  /// Passes the settings, which ranks compare, to the engine if a learning rate or another setting has changed.
  void tell_settings();
  /// Without a group, it is the learning rate of the parameters that no group matches. Throws Error if there is no such group.
  double lr(std::optional<std::size_t> group) const;
  void set_lr(std::optional<std::size_t> group, double lr);
  void set_lr_factor(double factor);
  void set_lr_factor(std::size_t group, double factor);
  /// Call it when settings have changed in another way, so that they are passed again.
  void settings_changed() { told.reset(); }
  /// Throws Error if a failed load has replaced only a part of the state.
  void refuse_torn() const;

  std::shared_ptr<engine::Engine> engine;
  std::vector<std::unique_ptr<optim::Algorithm>> algorithms;
  /// Whether the algorithms have a first group for the parameters that no ParamGroup matches. The user's group 0 is then their second one.
  bool has_defaults = true;
  /// Whether each has a learning rate of its own for the parameters that no group matches. lr() is then that of the first algorithm.
  bool algorithms_differ = false;
  const std::uint64_t number;  ///< The number of the optimizer in this process.
  /// The learning rate that was passed last, and the text of the other settings.
  std::optional<std::pair<double, std::string>> told;
  /// The names of state whose values failed loads may have replaced.
  std::set<std::string> torn;

 private:
  std::size_t index_of(std::optional<std::size_t> group) const;
};

}  // namespace fsdp
