#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fsdp/optim.h"

namespace fsdp {

namespace optim {

/// A stretch of a unit's main parameters whose parameters share a group and a step count: one tensor for the fused kernels.
struct Segment {
  std::size_t group = 0;
  at::Tensor value;
  at::Tensor gradient;
  std::vector<at::Tensor> state;  ///< As many as the optimizer keeps per element, each like value.
  at::Tensor step;                ///< 0-D fp32; the number of updates, incremented before each.
};

struct Group {
  double lr = 0;
  double weight_decay = 0;
};

/// One algorithm over a group's segments.
using Update = std::function<void(const Group& group, double lr, std::vector<Segment*>& segments)>;

/// Every rank's values, [rank][value], of all ranks of the root unit's mesh. Collective.
at::Tensor exchange(const engine::Engine& engine, std::vector<double>& values, const char* operation);

}  // namespace optim

/// Turns units into segments. Parameters that were never without a gradient, and fill whole vector registers [Same tails], share few long
/// segments; the division changes only when the set of parameters with gradients changes.
struct Optimizer::State {
  State(torch::nn::Module& module, optim::Group defaults, const std::vector<ParamGroup>& groups, std::size_t states_per_element,
        optim::Update update);
  virtual ~State();

  virtual void step();
  virtual double lr() const { return groups.front().lr * lr_factor; }
  virtual void set_lr_factor(double factor) { lr_factor = factor; }

  std::shared_ptr<engine::Engine> engine;
  double lr_factor = 1;

 protected:
  /// Without groups: for optimizers that bring their own.
  explicit State(torch::nn::Module& module);

 private:
  struct ParameterState {
    std::size_t group = 0;
    std::int64_t steps = 0;
    bool active = false;  ///< Is part of a segment now.
  };
  struct UnitState {
    std::vector<ParameterState> parameters;
    std::vector<std::vector<at::Tensor>> state;  ///< [state][sub-buffer]
    std::vector<optim::Segment> segments;
  };

  void allocate(const engine::Unit& unit, UnitState& state);
  void divide(const engine::Unit& unit, UnitState& state);

  std::vector<optim::Group> groups;
  std::size_t states_per_element = 0;
  optim::Update update;
  std::vector<UnitState> units;
  std::int64_t state_bytes = 0;
};

}  // namespace fsdp
