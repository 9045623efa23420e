#include "state/snapshot.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <numeric>
#include <type_traits>
#include <variant>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "optim/shard_optimizer.h"
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
  for (auto& box : ckpt::boxes_of_slice(item.piece.sizes, item.offset + item.own_begin, item.own_numel)) {
    for (std::size_t d = 0; d < box.offsets.size(); ++d) box.offsets[d] += item.piece.offsets[d];
    const auto numel = ckpt::numel(box.sizes);
    tensor.chunks.push_back({.box = std::move(box), .bytes = item.values.narrow(0, begin, numel).view(at::kByte), .guarded = item.guarded});
    begin += numel;
  }
}

void add(Snapshot& snapshot, DcpPath path, PythonValue value) {
  std::string key;
  for (const auto& part : path) {
    const auto* name = std::get_if<std::string>(&part);
    key += (key.empty() ? "" : ".") + (name != nullptr ? *name : std::to_string(std::get<std::int64_t>(part)));
  }
  snapshot.objects.push_back({std::move(key), std::move(path), std::move(value)});
}

PythonValue python_value(const optim::Setting& setting) {
  return std::visit(
      [](const auto& value) -> PythonValue {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::pair<double, double>>) {
          return {PythonValue::Tuple{{{value.first}, {value.second}}}};
        } else {
          return {value};
        }
      },
      setting);
}

void add_groups(Snapshot& snapshot, Optimizer& optimizer) {
  std::int64_t index = 0;
  for (const auto& part : optimizer.state().parts) {
    for (const auto& group : part->groups(optimizer.state().lr_factor)) {
      if (group.parameters.empty()) continue;
      for (const auto& [name, setting] : group.settings) {
        add(snapshot, DcpPath{kOptimizer, "param_groups", index, name}, python_value(setting));
      }
      PythonValue::List names;
      for (const auto& name : group.parameters) names.items.push_back({name});
      add(snapshot, DcpPath{kOptimizer, "param_groups", index, "params"}, {std::move(names)});
      ++index;
    }
  }
}

void add_extra(Snapshot& snapshot, const ExtraState& extra) {
  for (const auto& [name, value] : extra) {
    std::visit(
        [&, &name = name](const auto& typed) {
          if constexpr (std::is_same_v<std::decay_t<decltype(typed)>, at::Tensor>) {
            if (!typed.defined()) throw Error("extra state '" + name + "' is an undefined tensor");
            const auto values = typed.detach().contiguous().view({-1});
            add(snapshot, {.path = {kExtra, name},
                           .shape = typed.sizes().vec(),
                           .piece = ckpt::whole(typed.sizes().vec()),
                           .values = values,
                           .offset = 0,
                           .own_begin = 0,
                           .own_numel = values.numel()});
          } else {
            add(snapshot, DcpPath{kExtra, name}, {typed});
          }
        },
        value);
  }
}

}  // namespace

std::string rng_key(std::int64_t rank) { return std::string(kOwn) + ".rng." + std::to_string(rank); }

void HostBuffer::begin(Snapshot& snapshot) {
  std::int64_t bytes = 0;
  for (const auto& tensor : snapshot.tensors) {
    for (const auto& chunk : tensor.chunks) bytes += chunk.bytes.numel();
  }
  if (!memory_.defined() || memory_.numel() < bytes) {
    memory_ = at::Tensor();  // before the larger one
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
  // The computation goes on meanwhile on its own stream.
  std::optional<c10::StreamGuard> beside;
  if (ready_) {
    ready_->synchronize();
    beside.emplace(c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_));
  }
  const auto copies = std::exchange(copies_, {});  // holds what is copied until it has been
  for (const auto& copy : copies) copy.to.copy_(copy.from, /*non_blocking=*/true);
  memory::synchronize(device_);
}

Snapshot take_snapshot(torch::nn::Module& module, Optimizer* optimizer, const ExtraState& extra, const SaveOptions& options,
                       const Ranks& ranks) {
  const torch::NoGradGuard no_grad;
  const auto engine = handle(module).engine();
  engine->flush_writes();
  Snapshot snapshot;
  for (const auto& item : model_items(module, kModel)) add(snapshot, item);
  if (optimizer != nullptr) {
    if (optimizer->engine() != engine) throw Error("save: the optimizer belongs to another model");
    for (const auto& item : optimizer_step_items(*optimizer, kOptimizer)) {
      if (item.own_numel > 0) add(snapshot, item);
    }
    for (const auto& item : optimizer_items(*optimizer, kOptimizer)) add(snapshot, item);
  }
  if (options.rng) {
    auto generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    const auto state = generator.get_state();
    add(snapshot, {.path = {kOwn, "rng." + std::to_string(ranks.index())},
                   .shape = state.sizes().vec(),
                   .piece = ckpt::whole(state.sizes().vec()),
                   .values = state.view({-1}),
                   .offset = 0,
                   .own_begin = 0,
                   .own_numel = state.numel(),
                   .guarded = true});
  }
  if (ranks.index() == 0) {
    if (optimizer != nullptr) {
      add_groups(snapshot, *optimizer);
      add(snapshot, DcpPath{kOwn, "lr_factor"}, {optimizer->state().lr_factor});
    }
    add_extra(snapshot, extra);
  }
  return snapshot;
}

}  // namespace fsdp::state
