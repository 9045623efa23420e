#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/engine.h"
#include "fsdp/optim.h"

namespace fsdp {

namespace optim {

struct Group {
  double lr = 0;
  double weight_decay = 0;
};

/// A hyperparameter's value, of the type that torch.optim gives it; nothing is Python's None, pairs and lists are tuples.
using Setting = std::variant<std::monostate, bool, std::int64_t, double, std::string, std::pair<double, double>, std::vector<double>>;
using Settings = std::vector<std::pair<std::string, Setting>>;

/// A group as torch.optim describes it.
struct GroupDescription {
  Settings settings;
  std::vector<std::string> parameters;
};

/// Which parameters an algorithm updates, by unit and index.
using Selection = std::function<bool(const engine::Unit& unit, std::size_t parameter)>;

/// An algorithm's own settings, and those of the user's groups where they differ.
class Groups {
 public:
  /// Throws Error if a group has no predicate, or a learning rate or weight decay is negative or NaN.
  Groups(Group defaults, const std::vector<ParamGroup>& groups);
  std::size_t index_of(const std::string& parameter) const;
  const Group& operator[](std::size_t index) const { return settings_[index]; }
  std::size_t size() const { return settings_.size(); }
  /// As torch.optim describes them: `settings` that all share, learning rate and weight decay of each, and the parameters that `updates`
  /// says.
  std::vector<GroupDescription> describe(const engine::Engine& engine, const Selection& updates, const Settings& settings,
                                         double lr_factor) const;

 private:
  std::vector<Group> settings_;  // the defaults first
  std::vector<std::function<bool(const std::string& name)>> matches_;
};

/// One kind of state that an algorithm keeps for each element of a parameter, or for every block of elements.
struct StateKind {
  std::string name;  ///< As torch.optim calls it: "exp_avg".
  std::int64_t elements_per_value = 1;
};

/// This rank's values of one kind of state for its part of a parameter (Unit::main_slice).
struct StateTensor {
  const engine::Unit* unit = nullptr;
  std::size_t parameter = 0;
  StateKind kind;
  at::Tensor values;  ///< 1-D, a view: ceil(numel / elements_per_value) of them.
};

/// An algorithm on some of a model's parameters. An optimizer is one of these, or several that share the parameters out.
class Part {
 public:
  virtual ~Part() = default;
  virtual void step(double lr_factor) = 0;
  /// Of the parameters that no ParamGroup matches.
  virtual double base_lr() const = 0;

  // For checkpoints.

  virtual const std::vector<StateKind>& kinds() const = 0;
  virtual bool updates(const engine::Unit& unit, std::size_t parameter) const = 0;
  /// How often a parameter has been updated. Known where this rank has a part of it.
  virtual std::int64_t steps(const engine::Unit& unit, std::size_t parameter) const = 0;
  virtual void set_steps(const engine::Unit& unit, std::size_t parameter, std::int64_t steps) = 0;
  /// Of this rank's parts of parameters that have been updated. Makes what is missing (after set_steps), zero.
  virtual std::vector<StateTensor> state() = 0;
  virtual std::vector<GroupDescription> groups(double lr_factor) const = 0;
};

/// Optimizer state, entered in the engine's accounting for as long as it lives.
class StateMemory {
 public:
  explicit StateMemory(std::shared_ptr<engine::Engine> engine) : engine_(std::move(engine)) {}
  ~StateMemory();
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;
  /// 1-D, zero; where the unit's main parameters lie, or in host memory if its optimizer state is offloaded.
  at::Tensor zeros(const engine::Unit& unit, std::int64_t numel, at::ScalarType dtype);
  /// Runs `update`; meanwhile the tensors of `state`, which zeros() gave, lie beside the unit's main parameters.
  void with_state(const engine::Unit& unit, std::vector<at::Tensor>& state, const std::function<void()>& update);

 private:
  std::shared_ptr<engine::Engine> engine_;
  std::int64_t device_bytes_ = 0;
  std::int64_t host_bytes_ = 0;
};

/// A stretch of a unit's main parameters whose parameters share a group and a step count: one tensor for the fused kernels.
struct Segment {
  const engine::Unit* unit = nullptr;
  std::size_t group = 0;
  at::Tensor value;
  at::Tensor gradient;
  std::vector<at::Tensor> state;  ///< As many as the optimizer keeps per element, each like value.
  at::Tensor step;                ///< 0-D fp32; the number of updates, incremented before each.
};

/// One algorithm over a group's segments.
using Update = std::function<void(const Group& group, double lr, std::vector<Segment*>& segments)>;

/// Every rank's values (1-D, on the CPU), [rank][value], of all ranks of the root unit's mesh in the order of their own pieces, so that
/// sums over them are the same on every mesh of as many ranks; and of all that hold tensor-parallel pieces. Collective.
at::Tensor exchange(const engine::Engine& engine, const at::Tensor& values, const char* operation);

/// An elementwise algorithm. Turns units into segments: parameters that were never without a gradient, and fill whole vector registers
/// [Same tails], share few long segments; the division changes only when the set of parameters with gradients changes.
class Elementwise final : public Part {
 public:
  /// On the selected parameters, by default all.
  Elementwise(std::shared_ptr<engine::Engine> engine, Groups groups, std::vector<StateKind> kinds, Settings settings, Update update,
              const Selection& selection = {});
  void step(double lr_factor) override;
  double base_lr() const override { return groups_[0].lr; }
  const std::vector<StateKind>& kinds() const override { return kinds_; }
  bool updates(const engine::Unit& unit, std::size_t parameter) const override;
  std::int64_t steps(const engine::Unit& unit, std::size_t parameter) const override;
  void set_steps(const engine::Unit& unit, std::size_t parameter, std::int64_t steps) override;
  std::vector<StateTensor> state() override;
  std::vector<GroupDescription> groups(double lr_factor) const override;

 private:
  struct ParameterState {
    std::size_t group = 0;
    std::int64_t steps = 0;
    bool selected = true;
    bool active = false;  ///< Is part of a segment now.
  };
  /// This rank's part of a trainable parameter that is not empty.
  struct Piece {
    engine::Unit::MainSlice slice;
    std::size_t parameter;
  };
  /// State for a stretch of a sub-buffer: all of it, or as much as lies between parameters that are not selected.
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

  std::shared_ptr<engine::Engine> engine_;
  Groups groups_;
  std::vector<StateKind> kinds_;
  Settings settings_;
  Update update_;
  StateMemory memory_;
  std::vector<UnitState> units_;
};

/// AdamW through ATen's fused kernel. Throws Error if an option is out of range.
/// `more` settings are described, too: those of an optimizer of which this is a part.
std::unique_ptr<Part> adamw(std::shared_ptr<engine::Engine> engine, const AdamWOptions& options, const std::vector<ParamGroup>& groups,
                            const Selection& selection = {}, const Settings& more = {});

/// What torch.optim.AdamW says of itself, beside learning rate and weight decay.
Settings adam_settings(const std::tuple<double, double>& betas, double eps);

/// The groups of an optimizer that has these parts, without empty ones. Where two parts say the same of one group, each updates some
/// parameters of it (AdamW8bit: the large ones, and the rest).
std::vector<GroupDescription> describe_groups(const std::vector<std::unique_ptr<Part>>& parts, double lr_factor);

/// Throws Error(what) unless it holds.
void require(bool holds, const std::string& what);

}  // namespace optim

/// By default an optimizer that consists of algorithms of our own.
struct Optimizer::State {
  explicit State(torch::nn::Module& module);
  virtual ~State() = default;

  virtual void step();
  /// For the ranks to compare, if the learning rate has changed.
  void tell_settings();
  virtual double lr() const { return parts.front()->base_lr() * lr_factor; }
  virtual void set_lr_factor(double factor) { lr_factor = factor; }
  /// Throws Error if a load has left it half one checkpoint's.
  void refuse_torn() const;

  std::shared_ptr<engine::Engine> engine;
  std::vector<std::unique_ptr<optim::Part>> parts;
  double lr_factor = 1;
  const std::uint64_t number;  ///< Of the optimizers of this process.
  std::optional<double> told_lr;
  std::string settings;  ///< All others, as they are told.
  /// The names of state that failed loads may have replaced.
  std::set<std::string> torn;
};

}  // namespace fsdp
