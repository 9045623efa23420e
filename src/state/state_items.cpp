#include "state/state_items.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "base/any_strides.h"
#include "base/text.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "optim/shard_optimizer.h"
#include "state/ranks.h"

namespace fsdp::state {
namespace {

std::vector<std::string> path_below(const std::string& prefix, const std::vector<std::string>& rest) {
  std::vector<std::string> path;
  if (!prefix.empty()) path.push_back(prefix);
  path.insert(path.end(), rest.begin(), rest.end());
  return path;
}

/// Returns which of the values of a parameter that this rank holds are its own to write, as begin and numel.
std::pair<std::int64_t, std::int64_t> own_piece(const engine::Engine& engine, const engine::Unit& unit, std::size_t parameter) {
  const auto own = unit.slice(parameter, unit.own_pieces());
  if (own.numel == 0 || !engine.options().speaks_for(unit.parameters[parameter])) return {0, 0};
  return {own.parameter_offset - unit.main_slice(parameter).parameter_offset, own.numel};
}

ckpt::Box box_of(const engine::UnitParameter& parameter) { return {parameter.global_offset, parameter.shape}; }

/// True on the rank that owns the first element, which writes values that exist once per parameter.
bool owns_first_element(const engine::Engine& engine, const engine::Unit& unit, std::size_t parameter) {
  const auto& shape = unit.parameters[parameter].global_shape;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) {
    // No rank has an element, so the first rank counts as the owner.
    const auto& pieces = engine.options().tensor_parallel;
    return unit.own_pieces().first == 0 && (!pieces.defined() || pieces.coordinate(pieces.dims().front().name) == 0);
  }
  const auto& offset = unit.parameters[parameter].global_offset;
  const bool is_first = std::all_of(offset.begin(), offset.end(), [](std::int64_t begin) { return begin == 0; });
  const auto own = unit.slice(parameter, unit.own_pieces());
  return own.numel > 0 && own.parameter_offset == 0 && is_first && engine.options().speaks_for(unit.parameters[parameter]);
}

}  // namespace

std::string StateItem::key() const { return joined(path, "."); }

std::vector<StateItem> model_items(torch::nn::Module& module, const std::string& prefix) {
  const auto engine = handle(module).engine();
  std::vector<std::pair<std::size_t, StateItem>> ordered;
  for (const auto& unit : engine->units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      const auto slice = unit->main_slice(i);
      const auto [own_begin, own_numel] = own_piece(*engine, *unit, i);
      ordered.emplace_back(
          parameter.position,
          StateItem{.path = path_below(prefix, {parameter.name}),
                    .shape = parameter.global_shape,
                    .box = box_of(parameter),
                    .values = unit->main.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel),
                    .offset = slice.parameter_offset,
                    .own_begin = own_begin,
                    .own_numel = own_numel,
                    .guarded = !engine->main().is_exposed() && !(unit->replicated_parameters() && unit->main_is_shared(slice.sub_buffer))});
    }
  }
  std::sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<StateItem> items;
  for (auto& [position, item] : ordered) items.push_back(std::move(item));
  const bool speaks = CheckpointRanks(*engine, CheckpointRanks::Groups::kOfMesh).index() == 0;
  for (const auto& buffer : module.named_buffers()) {
    if (!buffer.value().defined()) continue;
    const auto dense = row_major(buffer.value());
    const auto values = dense.view({-1});
    items.push_back({.path = path_below(prefix, {buffer.key()}),
                     .shape = buffer.value().sizes().vec(),
                     .box = ckpt::whole(buffer.value().sizes().vec()),
                     .values = values,
                     .offset = 0,
                     .own_begin = 0,
                     .own_numel = speaks ? values.numel() : 0,
                     .source = dense.is_alias_of(buffer.value()) ? at::Tensor() : buffer.value()});
  }
  return items;
}

std::vector<StateItem> optimizer_items(Optimizer& optimizer, const std::string& prefix) {
  std::vector<StateItem> items;
  for (const auto& algorithm : optimizer.state().algorithms) {
    for (auto& tensor : algorithm->state()) {
      const auto& unit = *tensor.unit;
      const auto& parameter = unit.parameters[tensor.parameter];
      const auto slice = unit.main_slice(tensor.parameter);
      const auto [own_begin, own_numel] = own_piece(*optimizer.engine(), unit, tensor.parameter);
      const auto per_value = tensor.kind.elements_per_value;
      const auto values_of = [per_value](std::int64_t elements) { return (elements + per_value - 1) / per_value; };
      // A block may lie across the own pieces of two ranks that both hold all of it. It belongs to the rank with its first element.
      const auto own = slice.parameter_offset + own_begin;
      const auto offset = slice.parameter_offset / per_value;
      const std::vector<std::int64_t> blocks = {values_of(unit.layout.positions()[tensor.parameter].numel)};
      if (per_value != 1 && parameter.tensor_parallel) {
        throw Error("the optimizer's state '" + tensor.kind.name + "' of parameter '" + parameter.name +
                    "' has a value per block, which has no place in a tensor-parallel whole; use an optimizer with a value per element");
      }
      items.push_back({.path = path_below(prefix, {"state", parameter.name, tensor.kind.name}),
                       .shape = per_value == 1 ? parameter.global_shape : blocks,
                       .box = per_value == 1 ? box_of(parameter) : ckpt::whole(blocks),
                       .values = tensor.values,
                       .offset = offset,
                       .own_begin = values_of(own) - offset,
                       .own_numel = values_of(own + own_numel) - values_of(own),
                       .guarded = true});
    }
  }
  return items;
}

std::vector<std::string> optimizer_keys(Optimizer& optimizer, const std::string& prefix) {
  std::vector<std::string> keys;
  for (const auto& algorithm : optimizer.state().algorithms) {
    for (const auto& unit : optimizer.engine()->units()) {
      for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
        if (!algorithm->updates(*unit, i)) continue;
        for (const auto& kind : algorithm->kinds()) {
          StateItem item;
          item.path = path_below(prefix, {"state", unit->parameters[i].name, kind.name});
          keys.push_back(item.key());
        }
      }
    }
  }
  return keys;
}

std::vector<StateItem> optimizer_step_items(Optimizer& optimizer, const std::string& prefix) {
  std::vector<StateItem> items;
  for (const auto& algorithm : optimizer.state().algorithms) {
    const bool has_state = !algorithm->kinds().empty();
    for (const auto& unit : optimizer.engine()->units()) {
      for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
        if (!algorithm->updates(*unit, i)) continue;
        const auto steps = algorithm->steps(*unit, i);
        if (steps == 0 && !has_state) continue;  // nothing that could be lost
        items.push_back({.path = path_below(prefix, {"state", unit->parameters[i].name, "step"}),
                         .shape = {},
                         .box = {},
                         .values = at::full({1}, static_cast<double>(steps), at::kFloat),
                         .offset = 0,
                         .own_begin = 0,
                         .own_numel = owns_first_element(*optimizer.engine(), *unit, i) ? 1 : 0,
                         .guarded = true});
      }
    }
  }
  return items;
}

void set_optimizer_steps(Optimizer& optimizer, const std::function<std::int64_t(const std::string& parameter)>& steps) {
  for (const auto& algorithm : optimizer.state().algorithms) {
    for (const auto& unit : optimizer.engine()->units()) {
      for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
        if (algorithm->updates(*unit, i)) algorithm->set_steps(*unit, i, steps(unit->parameters[i].name));
      }
    }
  }
}

}  // namespace fsdp::state
