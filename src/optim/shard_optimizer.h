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
  virtual void step() = 0;

  // Its groups of parameters; that of parameters which no ParamGroup matches is the first.

  virtual std::size_t group_count() const = 0;
  /// Whether it updates parameters of the group.
  virtual bool has_parameters(std::size_t group) const = 0;
  virtual LearningRate lr(std::size_t group) const = 0;
  /// Throws Error if it is out of range.
  virtual void set_lr(std::size_t group, const LearningRate& lr) = 0;

  // For checkpoints.

  virtual const std::vector<StateKind>& kinds() const = 0;
  virtual bool updates(const engine::Unit& unit, std::size_t parameter) const = 0;
  /// How often a parameter has been updated. Known where this rank has a part of it.
  virtual std::int64_t steps(const engine::Unit& unit, std::size_t parameter) const = 0;
  virtual void set_steps(const engine::Unit& unit, std::size_t parameter, std::int64_t steps) = 0;
  /// Of this rank's parts of parameters that have been updated. Makes what is missing (after set_steps), zero.
  virtual std::vector<StateTensor> state() = 0;
  virtual std::vector<GroupDescription> groups() const = 0;
  /// Sets what of a group's `settings` can be set later, but for the learning rate. Throws Error where others differ.
  virtual void restore(std::size_t group, const Settings& settings) = 0;
};

/// One of this library's own algorithms: what they have in common.
class Algorithm : public Part {
 public:
  std::size_t group_count() const final { return groups_.size(); }
  bool has_parameters(std::size_t group) const final { return groups_.has_parameters(group); }
  LearningRate lr(std::size_t group) const final { return groups_[group].lr; }
  void set_lr(std::size_t group, const LearningRate& lr) final { groups_.set_lr(group, lr); }
  const std::vector<StateKind>& kinds() const final { return kinds_; }
  std::vector<GroupDescription> groups() const final;
  void restore(std::size_t group, const Settings& settings) final { groups_.restore(group, settings); }

 protected:
  Algorithm(std::shared_ptr<engine::Engine> engine, Groups groups, std::vector<StateKind> kinds)
      : engine_(std::move(engine)), groups_(std::move(groups)), kinds_(std::move(kinds)) {}
  /// Which parameters it updates, as updates() says.
  Selection selection() const;

  std::shared_ptr<engine::Engine> engine_;
  Groups groups_;

 private:
  std::vector<StateKind> kinds_;
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
  std::int64_t updates = 0;       ///< The same number, for the host.
};

/// One algorithm over a group's segments.
using Update = std::function<void(const Group& group, double lr, std::vector<Segment*>& segments)>;

/// Every rank's values (1-D, on the CPU), [rank][value], of all ranks of the root unit's mesh in the order of their own pieces, so that
/// sums over them are the same on every mesh of as many ranks; and of all that hold tensor-parallel pieces. Collective.
at::Tensor exchange(const engine::Engine& engine, const at::Tensor& values, const char* operation);

/// An elementwise algorithm. Turns units into segments: parameters that were never without a gradient, and fill whole vector registers
/// [Same tails], share few long segments; the division changes only when the set of parameters with gradients changes.
class Elementwise final : public Algorithm {
 public:
  /// On the selected parameters, by default all.
  Elementwise(std::shared_ptr<engine::Engine> engine, Groups groups, std::vector<StateKind> kinds, Update update,
              const Selection& selection = {});
  void step() override;
  bool updates(const engine::Unit& unit, std::size_t parameter) const override;
  std::int64_t steps(const engine::Unit& unit, std::size_t parameter) const override;
  void set_steps(const engine::Unit& unit, std::size_t parameter, std::int64_t steps) override;
  std::vector<StateTensor> state() override;

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

  Update update_;
  StateMemory memory_;
  std::vector<UnitState> units_;
};

/// AdamW through ATen's fused kernel. Throws Error if an option is out of range.
/// `more` settings are described, too: those of an optimizer of which this is a part.
std::unique_ptr<Part> adamw(std::shared_ptr<engine::Engine> engine, const AdamWOptions& options, const std::vector<ParamGroup>& groups,
                            const Selection& selection = {}, const Settings& more = {});

/// Those of torch.optim.AdamW, whose groups have `more` settings, too.
GroupRules adam_rules(const Settings& more);
Group adam_defaults(const AdamWOptions& options);

/// The groups of an optimizer that has these parts, without empty ones. Where two parts say the same of one group, each updates some
/// parameters of it (AdamW8bit: the large ones, and the rest).
std::vector<GroupDescription> describe_groups(const std::vector<std::unique_ptr<Part>>& parts);

}  // namespace optim

/// By default an optimizer that consists of algorithms of our own.
struct Optimizer::State {
  explicit State(torch::nn::Module& module);
  virtual ~State() = default;

  virtual void step();
  /// For the ranks to compare, if a learning rate or another setting has changed.
  void tell_settings();
  /// Nothing: of the parameters that no group matches. Throws Error if there is no such group.
  double lr(std::optional<std::size_t> group) const;
  void set_lr(std::optional<std::size_t> group, double lr);
  void set_lr_factor(double factor);
  void set_lr_factor(std::size_t group, double factor);
  /// To be called when settings have changed in another way: they are told again.
  void settings_changed() { told.reset(); }
  /// Throws Error if a load has left it half one checkpoint's.
  void refuse_torn() const;

  std::shared_ptr<engine::Engine> engine;
  std::vector<std::unique_ptr<optim::Part>> parts;
  /// The user's group 0 is a part's second one: the first is that of the parameters which no group matches.
  bool has_defaults = true;
  /// Each part has a learning rate of its own for the parameters that no group matches: lr() is the first part's.
  bool parts_differ = false;
  const std::uint64_t number;  ///< Of the optimizers of this process.
  /// The current learning rate with the text that ends what was told of the settings.
  std::optional<std::pair<double, std::string>> told;
  /// The names of state that failed loads may have replaced.
  std::set<std::string> torn;

 private:
  std::size_t index_of(std::optional<std::size_t> group) const;
};

}  // namespace fsdp
