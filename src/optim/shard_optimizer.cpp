#include "optim/shard_optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "base/after_error.h"
#include "base/replays.h"
#include "base/stream_capture.h"
#include "base/text.h"
#include "comm/mesh/ranks.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "memory/accounting.h"
#include "memory/device_memory.h"

namespace fsdp {

at::Tensor optim::exchange(const engine::Engine& engine, const at::Tensor& values, const char* operation) {
  const auto& communicators = engine.units().front()->communicators;
  const auto& pieces = engine.options().tensor_parallel;
  // The number of a piece is r * outer + o, so the inner rank comes before the outer one.
  const comm::Ranks ranks(
      {pieces.defined() ? pieces.communicator(pieces.dims().front().name) : nullptr, communicators.gather, communicators.outer});
  return ranks.exchange(values, {.operation = operation, .unit = "(all)"});
}

Optimizer::Optimizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Optimizer::~Optimizer() = default;
Optimizer::Optimizer(Optimizer&&) noexcept = default;
Optimizer& Optimizer::operator=(Optimizer&&) noexcept = default;

void Optimizer::step() {
  const at::NoGradGuard no_grad;
  state_->engine->main().flush_writes();
  state_->refuse_torn();
  state_->engine->main().finish_gradient_sync();
  try {
    state_->step();
  } catch (...) {
    after_error([&] { state_->engine->main().changed(); });  // some may be new
    throw;
  }
  state_->engine->main().changed();
}

void Optimizer::zero_grad() { state_->engine->main().zero_grad(); }
void Optimizer::set_lr_factor(double factor) { state_->set_lr_factor(factor); }
void Optimizer::set_lr_factor(std::size_t group, double factor) { state_->set_lr_factor(group, factor); }
void Optimizer::set_lr(double lr) { state_->set_lr(std::nullopt, lr); }
void Optimizer::set_lr(std::size_t group, double lr) { state_->set_lr(group, lr); }
double Optimizer::lr() const { return state_->lr(std::nullopt); }
double Optimizer::lr(std::size_t group) const { return state_->lr(group); }
const std::shared_ptr<engine::Engine>& Optimizer::engine() const { return state_->engine; }

namespace {

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

}  // namespace

Optimizer::State::State(torch::nn::Module& module) : engine(handle(module).engine()), number(next_number()) {}

std::size_t Optimizer::State::index_of(std::optional<std::size_t> group) const {
  if (!group) return 0;
  const auto count = algorithms.front()->group_count() - (has_defaults ? 1 : 0);
  if (*group >= count) {
    throw Error("there is no group " + std::to_string(*group) + " of parameters; the optimizer was given " + std::to_string(count) +
                ", which are numbered from 0");
  }
  return *group + (has_defaults ? 1 : 0);
}

double Optimizer::State::lr(std::optional<std::size_t> group) const {
  const auto index = index_of(group);
  const auto found =
      std::find_if(algorithms.begin(), algorithms.end(), [&](const auto& algorithm) { return group && algorithm->has_parameters(index); });
  return (found == algorithms.end() ? algorithms.front() : *found)->lr(index).now();
}

void Optimizer::State::set_lr(std::optional<std::size_t> group, double lr) {
  const auto index = index_of(group);
  for (const auto& algorithm : algorithms) {
    algorithm->set_lr(index, {.base = lr, .factor = algorithm->lr(index).factor});
    if (!group && algorithms_differ) break;
  }
  settings_changed();
}

void Optimizer::State::set_lr_factor(double factor) {
  for (const auto& algorithm : algorithms) {
    for (std::size_t g = 0; g < algorithm->group_count(); ++g) algorithm->set_lr(g, {.base = algorithm->lr(g).base, .factor = factor});
  }
}

void Optimizer::State::set_lr_factor(std::size_t group, double factor) {
  const auto index = index_of(group);
  for (const auto& algorithm : algorithms) algorithm->set_lr(index, {.base = algorithm->lr(index).base, .factor = factor});
}

void Optimizer::State::tell_settings() {
  // The factors may change in every step, so only the settings that change rarely are kept as text.
  if (!told) {
    std::string settings;
    for (const auto& group : optim::describe_groups(algorithms)) {
      for (const auto& [name, setting] : group.settings) {
        settings += name == "lr" ? optim::shown("base lr", group.lr.base) : optim::shown(name, setting);
      }
    }
    told.emplace(std::numeric_limits<double>::quiet_NaN(), std::move(settings));
  }
  const auto first = algorithms.front()->lr(0);
  std::string own;  // the texts of groups with factors of their own
  for (const auto& algorithm : algorithms) {
    for (std::size_t g = 1; g < algorithm->group_count(); ++g) {
      const auto lr = algorithm->lr(g);
      if (lr.factor != first.factor) own += ", lr of group " + std::to_string(g - (has_defaults ? 1 : 0)) + " " + shortest(lr.now());
    }
  }
  if (own.empty() && told->first == first.now()) return;
  told->first = own.empty() ? first.now() : std::numeric_limits<double>::quiet_NaN();
  engine->main().tell_update(number, std::string("lr ").append(shortest(first.now())).append(own).append(told->second));
}

void Optimizer::State::refuse_torn() const {
  if (torn.empty()) return;
  throw Error("a load of this optimizer failed halfway, so that its state belongs to no checkpoint; load it again, or make a new one");
}

void Optimizer::State::step() {
  if (!std::all_of(algorithms.begin(), algorithms.end(), [](const auto& algorithm) { return algorithm->can_be_captured(); })) {
    refuse_in_capture(engine->options().device(), "an optimizer's step", "capture steps of AdamW or SGD, or forward and backward alone");
  }
  tell_settings();
  for (const auto& algorithm : algorithms) algorithm->step();
}

namespace optim {
Selection BuiltInAlgorithm::selection() const {
  return [this](const engine::Unit& unit, std::size_t parameter) { return updates(unit, parameter); };
}

std::vector<GroupDescription> BuiltInAlgorithm::groups() const { return groups_.describe(*engine_, selection()); }

std::vector<GroupDescription> describe_groups(const std::vector<std::unique_ptr<Algorithm>>& algorithms) {
  std::vector<GroupDescription> all;
  std::vector<std::size_t> group_of;  // the index in `all` of each group of the algorithm
  for (const auto& algorithm : algorithms) {
    const auto groups = algorithm->groups();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (groups[g].parameters.empty()) continue;
      std::size_t same = 0;
      while (same < all.size() && (group_of[same] != g || all[same].lr != groups[g].lr || all[same].settings != groups[g].settings)) {
        ++same;
      }
      if (same == all.size()) {
        all.push_back(groups[g]);
        group_of.push_back(g);
      } else {
        all[same].parameters.insert(all[same].parameters.end(), groups[g].parameters.begin(), groups[g].parameters.end());
      }
    }
  }
  return all;
}

StateMemory::~StateMemory() {
  engine_->accounting().remove(memory::Kind::kOptimizerState, device_bytes_);
  engine_->accounting().remove(memory::Kind::kHost, host_bytes_);
}

at::Tensor StateMemory::zeros(const engine::Unit& unit, std::int64_t numel, at::ScalarType dtype) {
  const auto bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  const bool on_host = unit.options.offload != Offload::kNone;
  RECORD_USER_SCOPE(memory::allocation_range(on_host ? memory::Kind::kHost : memory::Kind::kOptimizerState));
  auto state =
      (on_host ? memory::host_zeros(engine_->options().device(), bytes) : memory::zeros(engine_->options().device(), bytes)).view(dtype);
  (on_host ? host_bytes_ : device_bytes_) += bytes;
  engine_->accounting().add(on_host ? memory::Kind::kHost : memory::Kind::kOptimizerState, bytes);
  return state;
}

void StateMemory::with_state(const engine::Unit& unit, std::vector<at::Tensor>& state, const std::function<void()>& update) {
  if (unit.options.offload != Offload::kOptimizerState) return update();
  std::vector<at::Tensor> on_device;
  std::int64_t bytes = 0;
  for (const auto& tensor : state) {
    on_device.push_back(
        at::empty(tensor.sizes(), tensor.options().device(engine_->options().device())).copy_(tensor, /*non_blocking=*/true));
    bytes += static_cast<std::int64_t>(tensor.nbytes());
  }
  engine_->accounting().add(memory::Kind::kOptimizerState, bytes);
  std::swap(state, on_device);
  const auto back = c10::make_scope_exit([&] {
    std::swap(state, on_device);
    engine_->accounting().remove(memory::Kind::kOptimizerState, bytes);
  });
  update();
  for (std::size_t i = 0; i < state.size(); ++i) on_device[i].copy_(state[i], /*non_blocking=*/true);
}

Elementwise::Elementwise(std::shared_ptr<engine::Engine> engine, Groups groups, std::vector<StateKind> kinds, Update update,
                         const Selection& selection)
    : BuiltInAlgorithm(std::move(engine), std::move(groups), std::move(kinds)), update_(std::move(update)), memory_(engine_) {
  for (const auto& unit : engine_->units()) {
    auto& state = units_.emplace_back();
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      state.parameters.push_back({.group = groups_.index_of(unit->parameters[i].name), .selected = !selection || selection(*unit, i)});
    }
  }
  groups_.take_in(*engine_, this->selection());
}

Elementwise::~Elementwise() { engine_->main().rejoin_streams(); }

std::vector<Elementwise::Piece> Elementwise::pieces_of(const engine::Unit& unit) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    const auto slice = unit.main_slice(i);
    if (unit.parameters[i].trainable && slice.numel > 0) pieces.push_back({slice, i});
  }
  std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) {
    return std::pair(a.slice.sub_buffer, a.slice.offset) < std::pair(b.slice.sub_buffer, b.slice.offset);
  });
  return pieces;
}

void Elementwise::allocate(const engine::Unit& unit, UnitState& state) {
  state.allocated = true;
  std::vector<bool> in_use(unit.main_gradient.parts.size(), false);
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    if (unit.parameters[i].trainable && state.parameters[i].selected) in_use[unit.layout.positions()[i].sub_buffer] = true;
  }
  const auto pieces = pieces_of(unit);
  for (std::size_t k = 0; k < in_use.size(); ++k) {
    if (!in_use[k]) continue;
    const auto add = [&](std::int64_t begin, std::int64_t end) {
      auto& stretch = state.stretches.emplace_back(Stretch{.sub_buffer = k, .begin = begin, .end = end, .state = {}});
      for (std::size_t s = 0; s < kinds().size(); ++s) {
        stretch.state.push_back(memory_.zeros(unit, end - begin, unit.main.parts[k].scalar_type()));
      }
    };
    std::int64_t begin = 0;
    bool has_selected = false;
    for (const auto& [slice, parameter] : pieces) {
      if (slice.sub_buffer != k) continue;
      if (state.parameters[parameter].selected) {
        has_selected = true;
        continue;
      }
      if (has_selected) add(begin, slice.offset);
      begin = slice.offset + slice.numel;
      has_selected = false;
    }
    if (has_selected || begin == 0) add(begin, unit.main.parts[k].numel());
  }
}

void Elementwise::divide(const engine::Unit& unit, UnitState& state) {
  ++divisions_;
  state.segments.clear();
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    state.parameters[i].active = unit.parameters[i].has_gradient && state.parameters[i].selected;
  }
  const auto pieces = pieces_of(unit);
  auto stretch = state.stretches.begin();
  for (std::size_t begin = 0; begin < pieces.size();) {
    const auto& first = state.parameters[pieces[begin].parameter];
    const auto itemsize = static_cast<std::int64_t>(unit.main.parts[pieces[begin].slice.sub_buffer].element_size());
    std::size_t end = begin + 1;
    while (end < pieces.size() && pieces[end].slice.sub_buffer == pieces[begin].slice.sub_buffer) {
      // [Same tails] ATen's kernels round a tensor's last elements, fewer than a vector register's, differently from the others. The same
      // elements must be last as if each parameter were a tensor of its own, so a segment continues only after whole registers.
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
      while (stretch->sub_buffer != k || stretch->end < from + numel) ++stretch;
      Segment segment{.unit = &unit,
                      .group = first.group,
                      .value = unit.main.parts[k].narrow(0, from, numel),
                      .gradient = unit.main_gradient.parts[k].narrow(0, from, numel),
                      .state = {},
                      .step = at::full({}, static_cast<double>(first.steps), unit.main.parts[k].options().dtype(at::kFloat)),
                      .updates = first.steps};
      for (const auto& buffer : stretch->state) {
        segment.state.push_back(buffer.narrow(0, from - stretch->begin, numel));
        if (first.steps == 0) segment.state.back().zero_();  // a load may have set the count back
      }
      state.segments.push_back(std::move(segment));
    }
    begin = end;
  }
}

bool Elementwise::updates(const engine::Unit& unit, std::size_t parameter) const {
  return unit.parameters[parameter].trainable && units_[unit.place.index].parameters[parameter].selected;
}

std::int64_t Elementwise::steps(const engine::Unit& unit, std::size_t parameter) const {
  return units_[unit.place.index].parameters[parameter].steps;
}

void Elementwise::set_steps(const engine::Unit& unit, std::size_t parameter, std::int64_t steps) {
  auto& state = units_[unit.place.index];
  state.parameters[parameter].steps = steps;
  state.segments.clear();  // They hold counts of their own, and are divided by them.
  ++divisions_;
}

std::vector<StateTensor> Elementwise::state() {
  std::vector<StateTensor> tensors;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const auto& unit = *engine_->units()[u];
    auto& state = units_[u];
    auto stretch = state.stretches.begin();
    for (const auto& [slice, parameter] : pieces_of(unit)) {
      if (!state.parameters[parameter].selected || state.parameters[parameter].steps == 0) continue;
      if (!state.allocated) {
        allocate(unit, state);
        stretch = state.stretches.begin();
      }
      while (stretch->sub_buffer != slice.sub_buffer || stretch->end < slice.offset + slice.numel) ++stretch;
      for (std::size_t s = 0; s < kinds().size(); ++s) {
        tensors.push_back({.unit = &unit,
                           .parameter = parameter,
                           .kind = kinds()[s],
                           .values = stretch->state[s].narrow(0, slice.offset - stretch->begin, slice.numel)});
      }
    }
  }
  return tensors;
}

void Elementwise::step() {
  std::vector<std::vector<Segment*>> by_group(groups_.size());
  std::vector<std::size_t> updated;  // units
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const auto& unit = *engine_->units()[u];
    auto& state = units_[u];
    if (!unit.main_gradient.valid) continue;
    updated.push_back(u);
    if (!state.allocated) allocate(unit, state);
    bool changed = state.segments.empty();
    for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
      changed = changed || state.parameters[i].active != (unit.parameters[i].has_gradient && state.parameters[i].selected);
    }
    if (changed) divide(unit, state);
    for (auto& segment : state.segments) {
      segment.step.add_(1);
      by_group[segment.group].push_back(&segment);
    }
    count_step(state, 1);
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    // Gradients of another dtype, and offloaded state, are copied one segment at a time, so that the copies stay small.
    auto& segments = by_group[g];
    const auto copied = std::stable_partition(segments.begin(), segments.end(), [](const Segment* segment) {
      return segment->gradient.scalar_type() == segment->value.scalar_type() && segment->unit->options.offload != Offload::kOptimizerState;
    });
    for (auto segment = copied; segment != segments.end(); ++segment) {
      std::vector<Segment*> one{*segment};
      memory_.with_state(*one[0]->unit, one[0]->state, [&] { update_(groups_[g], groups_[g].lr.now(), one); });
    }
    segments.erase(copied, segments.end());
    if (!segments.empty()) update_(groups_[g], groups_[g].lr.now(), segments);
  }
  if (is_asked_for_replays()) {
    for (const auto u : updated) count_step(units_[u], -1);  // It is recorded, and happens with each replay.
  }
  tell_replays(std::move(updated));
}

void Elementwise::count_step(UnitState& state, int by) {
  for (auto& parameter : state.parameters) parameter.steps += parameter.active ? by : 0;
  for (auto& segment : state.segments) segment.updates += by;
}

/// A graph has the learning rates and the segments of its capture.
void Elementwise::tell_replays(std::vector<std::size_t> updated) {
  std::vector<double> lrs;
  for (std::size_t g = 0; g < groups_.size(); ++g) lrs.push_back(groups_[g].lr.now());
  const auto check = [this, exists = std::weak_ptr(exists_), lrs, divisions = divisions_] {
    if (exists.expired()) throw Error("CapturedStep::replay: the optimizer that was captured no longer exists");
    for (std::size_t g = 0; g < lrs.size(); ++g) {
      if (groups_[g].lr.now() == lrs[g]) continue;
      throw Error("CapturedStep::replay: a learning rate is " + shortest(groups_[g].lr.now()) + ", but the step was captured with " +
                  shortest(lrs[g]) + ", which its graph has; capture it again");
    }
    if (divisions_ == divisions) return;
    throw Error(
        "CapturedStep::replay: since the step was captured, a checkpoint was loaded, or other parameters had gradients; capture it "
        "again");
  };
  const auto count = [this, updated = std::move(updated)] {
    for (const auto u : updated) count_step(units_[u], 1);
  };
  beside_each_replay({.before = check, .after = count});
}

}  // namespace optim
}  // namespace fsdp
