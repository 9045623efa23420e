#include "optim/shard_optimizer.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "memory/device_memory.h"

namespace fsdp {
namespace {

/// NaN is refused, too.
void require_not_negative(double value, const char* what) {
  if (!(value >= 0)) throw Error(std::string(what) + " " + std::to_string(value) + "; give 0 or more");
}

}  // namespace

at::Tensor optim::exchange(const engine::Engine& engine, std::vector<double>& values, const char* operation) {
  const auto& groups = engine.units().front()->groups;
  const comm::Label label{.operation = operation, .unit = "(all)"};
  const auto count = static_cast<std::int64_t>(values.size());
  auto all = groups.gather->exchange(at::from_blob(values.data(), {count}, at::kDouble), label);
  if (groups.outer) all = groups.outer->exchange(all.reshape({-1}), label);
  return all.reshape({-1, count});
}

Optimizer::Optimizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Optimizer::~Optimizer() = default;
Optimizer::Optimizer(Optimizer&&) noexcept = default;
Optimizer& Optimizer::operator=(Optimizer&&) noexcept = default;

void Optimizer::step() {
  const torch::NoGradGuard no_grad;
  state_->engine->flush_writes();
  state_->engine->finish_gradient_sync();
  state_->step();
  state_->engine->main_parameters_changed();
}

void Optimizer::zero_grad() { state_->engine->zero_grad(); }
void Optimizer::set_lr_factor(double factor) { state_->set_lr_factor(factor); }
double Optimizer::lr() const { return state_->lr(); }

Optimizer::State::State(torch::nn::Module& module) : engine(handle(module).engine()) {}

Optimizer::State::State(torch::nn::Module& module, optim::Group defaults, const std::vector<ParamGroup>& param_groups, std::size_t states,
                        optim::Update update_)
    : engine(handle(module).engine()), groups{defaults}, states_per_element(states), update(std::move(update_)) {
  for (const auto& group : param_groups) {
    if (!group.matches) throw Error("a ParamGroup without `matches`; give a predicate on the parameter's name");
    groups.push_back({.lr = group.lr.value_or(defaults.lr), .weight_decay = group.weight_decay.value_or(defaults.weight_decay)});
  }
  for (const auto& group : groups) {
    require_not_negative(group.lr, "learning rate");
    require_not_negative(group.weight_decay, "weight decay");
  }
  for (const auto& unit : engine->units()) {
    auto& state = units.emplace_back();
    for (const auto& parameter : unit->parameters) {
      std::size_t group = 0;
      while (group < param_groups.size() && !param_groups[group].matches(parameter.name)) ++group;
      state.parameters.push_back({.group = group < param_groups.size() ? group + 1 : 0});
    }
  }
}

Optimizer::State::~State() { engine->accounting().remove(memory::Kind::kOptimizerState, state_bytes); }

void Optimizer::State::allocate(const engine::Unit& unit, UnitState& state) {
  for (std::size_t s = 0; s < states_per_element; ++s) {
    auto& buffers = state.state.emplace_back();
    for (std::size_t k = 0; k < unit.main_gradient.size(); ++k) {
      const auto bytes = static_cast<std::int64_t>(unit.main[k].nbytes());
      buffers.push_back(memory::zeros(unit.main[k].device(), bytes).view(unit.main[k].scalar_type()));
      state_bytes += bytes;
      engine->accounting().add(memory::Kind::kOptimizerState, bytes);
    }
  }
}

void Optimizer::State::divide(const engine::Unit& unit, UnitState& state) {
  state.segments.clear();
  struct Piece {
    engine::Unit::MainSlice slice;
    std::size_t parameter;
  };
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    state.parameters[i].active = unit.parameters[i].has_gradient;
    const auto slice = unit.main_slice(i);
    if (unit.parameters[i].trainable && slice.numel > 0) pieces.push_back({slice, i});
  }
  std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) {
    return std::pair(a.slice.sub_buffer, a.slice.offset) < std::pair(b.slice.sub_buffer, b.slice.offset);
  });
  for (std::size_t begin = 0; begin < pieces.size();) {
    const auto& first = state.parameters[pieces[begin].parameter];
    const auto itemsize = static_cast<std::int64_t>(unit.main[pieces[begin].slice.sub_buffer].element_size());
    std::size_t end = begin + 1;
    while (end < pieces.size() && pieces[end].slice.sub_buffer == pieces[begin].slice.sub_buffer) {
      // [Same tails] ATen's kernels round a tensor's last elements, fewer than a vector register's, differently from the others. So that
      // the same elements are last as when each parameter is a tensor of its own, a segment goes on only behind whole registers.
      const auto& last = pieces[end - 1].slice;
      const auto length = last.offset + last.numel - pieces[begin].slice.offset;
      if (length * itemsize % layout::kAlignment != 0 || pieces[end].slice.offset != last.offset + last.numel) break;
      const auto& next = state.parameters[pieces[end].parameter];
      if (next.active != first.active || next.group != first.group || next.steps != first.steps) break;
      ++end;
    }
    if (first.active) {
      const auto k = pieces[begin].slice.sub_buffer;
      const auto from = pieces[begin].slice.offset;
      const auto numel = pieces[end - 1].slice.offset + pieces[end - 1].slice.numel - from;
      optim::Segment segment{.group = first.group,
                             .value = unit.main[k].narrow(0, from, numel),
                             .gradient = unit.main_gradient[k].narrow(0, from, numel),
                             .state = {},
                             .step = at::full({}, static_cast<double>(first.steps), at::kFloat).to(unit.main[k].device())};
      for (const auto& buffers : state.state) segment.state.push_back(buffers[k].narrow(0, from, numel));
      state.segments.push_back(std::move(segment));
    }
    begin = end;
  }
}

void Optimizer::State::step() {
  std::vector<std::vector<optim::Segment*>> by_group(groups.size());
  for (std::size_t u = 0; u < units.size(); ++u) {
    const auto& unit = *engine->units()[u];
    auto& state = units[u];
    if (!unit.main_gradient_valid) continue;
    if (state.state.empty()) allocate(unit, state);
    bool changed = state.segments.empty();
    for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
      changed = changed || state.parameters[i].active != unit.parameters[i].has_gradient;
    }
    if (changed) divide(unit, state);
    for (auto& segment : state.segments) {
      segment.step.add_(1);
      by_group[segment.group].push_back(&segment);
    }
    for (auto& parameter : state.parameters) parameter.steps += parameter.active ? 1 : 0;
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    // Gradients of another dtype are converted one segment at a time, so that the copies stay small.
    auto& segments = by_group[g];
    const auto converted = std::stable_partition(segments.begin(), segments.end(), [](const optim::Segment* segment) {
      return segment->gradient.scalar_type() == segment->value.scalar_type();
    });
    for (auto segment = converted; segment != segments.end(); ++segment) {
      std::vector<optim::Segment*> one{*segment};
      update(groups[g], groups[g].lr * lr_factor, one);
    }
    segments.erase(converted, segments.end());
    if (!segments.empty()) update(groups[g], groups[g].lr * lr_factor, segments);
  }
}

}  // namespace fsdp
