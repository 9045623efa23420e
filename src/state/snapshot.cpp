#include "state/snapshot.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <map>
#include <numeric>
#include <string_view>
#include <type_traits>
#include <variant>

#include "base/any_strides.h"
#include "checkpoint/printable.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "optim/shard_optimizer.h"
#include "state/extra.h"
#include "state/scalar_type.h"
#include "state/state_items.h"

namespace fsdp::state {
namespace {

using ckpt::DcpPath;
using ckpt::PythonValue;

void add(Snapshot& snapshot, const StateItem& item) {
  const auto key = item.key();
  auto& tensor = snapshot.tensors.emplace_back();
  tensor.key = key;
  tensor.path.assign(item.path.begin(), item.path.end());
  tensor.dtype = dtype_of(item.values.scalar_type(), key);
  tensor.shape = item.shape;
  const auto whole = std::accumulate(item.shape.begin(), item.shape.end(), std::int64_t{1}, std::multiplies<>());
  if (whole == 0) {
    tensor.chunks.push_back({.box = ckpt::whole(item.shape), .bytes = at::empty({0}, at::kByte), .guarded = true});
    return;
  }
  if (item.own_numel == 0) return;
  std::int64_t begin = item.own_begin;
  for (auto& box : ckpt::boxes_of_slice(item.box, item.offset + item.own_begin, item.own_numel)) {
    const auto numel = ckpt::numel(box.sizes);
    tensor.chunks.push_back({.box = std::move(box), .bytes = item.values.narrow(0, begin, numel).view(at::kByte), .guarded = item.guarded});
    begin += numel;
  }
}

void add(Snapshot& snapshot, DcpPath path, PythonValue value) {
  auto key = key_of(path);
  snapshot.objects.push_back({std::move(key), std::move(path), std::move(value)});
}

PythonValue python_value(const optim::Setting& setting) {
  return std::visit(
      [](const auto& value) -> PythonValue {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::pair<double, double>>) {
          return {PythonValue::Tuple{{{value.first}, {value.second}}}};
        } else if constexpr (std::is_same_v<T, std::vector<double>>) {
          PythonValue::Tuple tuple;
          for (const double item : value) tuple.items.push_back({item});
          return {std::move(tuple)};
        } else {
          return {value};
        }
      },
      setting);
}

void add_groups(Snapshot& snapshot, Optimizer& optimizer) {
  std::int64_t index = 0;
  for (const auto& group : optim::describe_groups(optimizer.state().algorithms)) {
    add(snapshot, DcpPath{kOwn, "base_lr", index}, {group.lr.base});
    add(snapshot, DcpPath{kOwn, "group_lr_factor", index}, {group.lr.factor});
    for (const auto& [name, setting] : group.settings) {
      add(snapshot, DcpPath{kOptimizer, "param_groups", index, name}, python_value(setting));
    }
    PythonValue::List names;
    for (const auto& name : group.parameters) names.items.push_back({name});
    add(snapshot, DcpPath{kOptimizer, "param_groups", index, "params"}, {std::move(names)});
    ++index;
  }
}

/// Adds a tensor that this rank writes as a whole.
void add_whole(Snapshot& snapshot, const DcpPath& path, const at::Tensor& tensor, bool guarded) {
  const auto values = row_major(tensor).view({-1});
  add(snapshot, {.path = {key_of(path)},
                 .shape = tensor.sizes().vec(),
                 .box = ckpt::whole(tensor.sizes().vec()),
                 .values = values,
                 .offset = 0,
                 .own_begin = 0,
                 .own_numel = values.numel(),
                 .guarded = guarded});
  snapshot.tensors.back().path = path;
}

void add_extra(Snapshot& snapshot, const DcpPath& below, const ExtraState& extra) {
  for_each_item(
      below, extra, [&](const DcpPath& path, const at::Tensor& tensor) { add_whole(snapshot, path, tensor, /*guarded=*/false); },
      [&](const DcpPath& path, PythonValue value) { add(snapshot, path, std::move(value)); });
}

}  // namespace

std::string key_of(const DcpPath& path) {
  std::string key;
  for (const auto& part : path) {
    const auto* name = std::get_if<std::string>(&part);
    key += (key.empty() ? "" : ".") + (name != nullptr ? *name : std::to_string(std::get<std::int64_t>(part)));
  }
  return key;
}

std::string SavedGenerator::key(std::int64_t rank) const { return std::string(kOwn) + "." + name + "." + std::to_string(rank); }

at::Tensor SavedGenerator::state() {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

bool SavedGenerator::takes(const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  auto trial = generator.clone();
  try {
    trial.set_state(state);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void SavedGenerator::set_state(const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

std::vector<SavedGenerator> generators_of(c10::Device device) {
  std::vector<SavedGenerator> generators = {{"rng", at::globalContext().defaultGenerator(at::kCPU)}};
  if (!device.is_cpu()) {
    generators.push_back({c10::DeviceTypeName(device.type(), /*lower_case=*/true) + "_rng", at::globalContext().defaultGenerator(device)});
  }
  return generators;
}

std::vector<std::pair<std::string, PythonValue>> values_of(const GradScalerState& state) {
  return {{"scale", {state.scale}},
          {"growth_factor", {state.growth_factor}},
          {"backoff_factor", {state.backoff_factor}},
          {"growth_interval", {state.growth_interval}},
          {"_growth_tracker", {state.growth_tracker}}};
}

namespace {

/// "extra['a.b'][0]"
std::string text_of(const DcpPath& path) {
  std::string text;
  for (const auto& part : path) {
    const auto* name = std::get_if<std::string>(&part);
    if (text.empty() && name != nullptr) {
      text = *name;
    } else {
      text += name != nullptr ? "['" + *name + "']" : "[" + std::to_string(std::get<std::int64_t>(part)) + "]";
    }
  }
  return text;
}

/// Returns the first text in a value that is not UTF-8; null if there is none.
const std::string* unreadable_text(const PythonValue& value) {
  const auto among = [](const auto& items) -> const std::string* {
    for (const auto& item : items) {
      if (const auto* found = unreadable_text(item)) return found;
    }
    return nullptr;
  };
  if (const auto* text = std::get_if<std::string>(&value.value)) return ckpt::is_utf8(*text) ? nullptr : text;
  if (const auto* list = std::get_if<PythonValue::List>(&value.value)) return among(list->items);
  if (const auto* tuple = std::get_if<PythonValue::Tuple>(&value.value)) return among(tuple->items);
  if (const auto* dict = std::get_if<PythonValue::Dict>(&value.value)) {
    for (const auto& entry : dict->items) {
      const auto* found = unreadable_text(entry.key);
      if (found == nullptr) found = unreadable_text(entry.value);
      if (found != nullptr) return found;
    }
  }
  return nullptr;
}

}  // namespace

void check_names(const Snapshot& snapshot) {
  std::map<std::string_view, const DcpPath*> paths;
  const auto check = [&](const std::string& key, const DcpPath& path) {
    if (!ckpt::is_utf8(key)) {
      throw Error("the name '" + ckpt::printable_bytes(key) + "' is not UTF-8, and Python could read nothing of the checkpoint; rename it");
    }
    const auto [found, is_new] = paths.emplace(key, &path);
    if (!is_new) {
      throw Error(text_of(*found->second) + " and " + text_of(path) + " would both be saved by the name '" + key + "'; rename one of them");
    }
  };
  for (const auto& tensor : snapshot.tensors) check(tensor.key, tensor.path);
  for (const auto& object : snapshot.objects) {
    check(object.key, object.path);
    if (const auto* text = unreadable_text(object.value)) {
      throw Error("'" + object.key + "' has the text '" + ckpt::printable_bytes(*text) +
                  "', which is not UTF-8, and Python could not read it; save it as bytes (ExtraBytes)");
    }
  }
}

std::int64_t bytes_of(const Snapshot& snapshot) {
  std::int64_t bytes = 0;
  for (const auto& tensor : snapshot.tensors) {
    for (const auto& chunk : tensor.chunks) bytes += chunk.bytes.numel();
  }
  return bytes;
}

void HostBuffer::begin(Snapshot& snapshot) {
  const std::int64_t bytes = bytes_of(snapshot);
  if (bytes > (memory_.defined() ? memory_.numel() : 0)) {
    memory_ = at::Tensor();  // freed before the larger one is made
    memory_ = memory::host_zeros(device_, bytes);
  }
  copies_.clear();
  std::int64_t begin = 0;
  for (auto& tensor : snapshot.tensors) {
    for (auto& chunk : tensor.chunks) {
      const auto place = memory_.narrow(0, begin, chunk.bytes.numel());
      begin += chunk.bytes.numel();
      if (chunk.guarded) {
        copies_.push_back({.from = chunk.bytes, .to = place});
      } else {
        place.copy_(chunk.bytes);
      }
      chunk.bytes = place;
    }
  }
  if (device_.is_cpu()) return;
  ready_.emplace(device_.type());
  ready_->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

void HostBuffer::finish() {
  const c10::DeviceGuard guard(device_);  // The current device of a new thread is the first one, and waiting there would make a context.
  // The computation continues meanwhile on its own stream.
  std::optional<c10::StreamGuard> beside;
  if (ready_) {
    ready_->synchronize();
    beside.emplace(c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_));
  }
  const auto copies = std::exchange(copies_, {});  // keeps the tensors alive until they have been copied
  for (const auto& copy : copies) copy.to.copy_(copy.from, /*non_blocking=*/true);
  memory::synchronize(device_);
}

Snapshot take_snapshot(torch::nn::Module& module, Optimizer* optimizer, const ExtraState& extra, const SaveOptions& options,
                       const CheckpointRanks& ranks) {
  const at::NoGradGuard no_grad;
  const auto engine = handle(module).engine();
  engine->main().flush_writes();
  Snapshot snapshot;
  for (const auto& item : model_items(module, kModel)) add(snapshot, item);
  if (optimizer != nullptr) {
    if (optimizer->engine() != engine) throw Error("save: the optimizer belongs to another model");
    optimizer->state().refuse_torn();
    for (const auto& item : optimizer_step_items(*optimizer, kOptimizer)) {
      if (item.own_numel > 0) add(snapshot, item);
    }
    for (const auto& item : optimizer_items(*optimizer, kOptimizer)) add(snapshot, item);
  }
  if (options.rng) {
    for (auto& generator : generators_of(engine->options().device())) {
      add_whole(snapshot, DcpPath{kOwn, generator.name + "." + std::to_string(ranks.index())}, generator.state(), /*guarded=*/true);
    }
  }
  add_extra(snapshot, DcpPath{kRankExtra, std::to_string(ranks.index())}, options.rank_extra);
  if (ranks.index() == 0) {
    if (optimizer != nullptr) {
      add_groups(snapshot, *optimizer);
      add(snapshot, DcpPath{kOwn, "lr_factor"}, {optimizer->state().algorithms.front()->lr(0).factor});
    }
    add(snapshot, DcpPath{kOwn, "ranks"}, {ranks.size()});
    if (options.metric) add(snapshot, DcpPath{kOwn, "metric"}, {*options.metric});
    if (options.grad_scaler != nullptr) {
      for (auto& [name, value] : values_of(options.grad_scaler->state_dict())) add(snapshot, DcpPath{kScaler, name}, std::move(value));
    }
    add_extra(snapshot, DcpPath{kExtra}, extra);
  }
  check_names(snapshot);
  return snapshot;
}

}  // namespace fsdp::state
