// The handle's methods: what users ask of the engine.

#include "fsdp/fsdp_module.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "api/registry.h"
#include "base/tensor_over.h"
#include "comm/communicator.h"
#include "comm/mesh/joined_row.h"
#include "engine/engine.h"
#include "engine/wire_stats.h"
#include "fsdp/error.h"
#include "paging/paged_model.h"
#include "paging/paged_storage.h"

namespace fsdp {
namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Entries of all units, to be brought into the order of named_parameters().
template <typename Value>
class Ordered {
 public:
  void add(std::size_t position, Value value) { entries_.emplace_back(position, std::move(value)); }
  std::vector<Value> take() {
    std::sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<Value> values;
    for (auto& entry : entries_) values.push_back(std::move(entry.second));
    return values;
  }

 private:
  std::vector<std::pair<std::size_t, Value>> entries_;
};

/// Calls `change` with the options of the handle's unit, and with those of the units within it.
template <typename Change>
void set_options(const engine::Engine& engine, std::size_t unit, bool recurse, const Change& change) {
  paging::PagedModel::of(engine).validated = false;  // A memory budget looks at settings.
  for (const auto& other : engine.units()) {
    if (other->place.index == unit || (recurse && engine::encloses(*engine.units()[unit], *other))) change(other->options);
  }
}

std::vector<std::size_t> indices_of(const engine::Engine& engine, const std::vector<FSDPModule>& modules) {
  std::vector<std::size_t> indices;
  for (const auto& module : modules) {
    if (module.engine().get() != &engine) throw Error("a module to prefetch belongs to another sharded model");
    indices.push_back(module.unit());
  }
  return indices;
}

}  // namespace

void FSDPModule::unshard() {
  auto& unit = *engine_->units()[unit_];
  engine_->unshard(unit, /*wait=*/true);
  static_cast<paging::PagedStorage*>(unit.whole.buffer.storage.unsafeGetStorageImpl())->watch_address();
}
void FSDPModule::reshard() { engine_->reshard(*engine_->units()[unit_]); }
void FSDPModule::set_allocate_memory_from_process_group_for_comm(bool enable) {
  engine_->set({.buffer_memory = enable ? comm::BufferMemory::kGroup : comm::BufferMemory::kProcess});
}
void FSDPModule::set_prefetch_depth(int depth) { engine_->set({.prefetch_depth = depth}); }
void FSDPModule::set_is_last_backward(bool is_last_backward) {
  paging::PagedModel::of(*engine_).validated = false;
  engine_->set({.is_last_backward = is_last_backward});
}
void FSDPModule::finish_gradient_sync() { engine_->main().finish_gradient_sync(); }
void FSDPModule::reset() { engine_->reset(); }
void FSDPModule::zero_grad() { engine_->main().zero_grad(); }
void FSDPModule::main_parameters_changed() { engine_->main().shards_changed(); }

UnshardHandle FSDPModule::unshard_async() {
  engine_->unshard(*engine_->units()[unit_], /*wait=*/false);
  return UnshardHandle([module = *this]() mutable { module.unshard(); });
}

void FSDPModule::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) {
  set_options(*engine_, unit_, recurse, [&](auto& options) {
    options.requires_gradient_sync = requires_gradient_sync;
    options.requires_all_reduce = requires_gradient_sync;
  });
}

void FSDPModule::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  set_options(*engine_, unit_, recurse, [&](auto& options) { options.requires_all_reduce = requires_all_reduce; });
}

void FSDPModule::set_gradient_divide_factor(double factor, bool recurse) {
  if (!(factor >= 0))
    throw Error("gradient divide factor " + std::to_string(factor) + "; give a positive one, or 0 for the number of ranks");
  set_options(*engine_, unit_, recurse, [&](auto& options) { options.gradient_divide_factor = factor; });
}

void FSDPModule::set_reshard_after_forward(bool reshard_after_forward, bool recurse) {
  const auto after = reshard_after_forward ? engine::AfterForward::kReshard : engine::AfterForward::kUntilBackward;
  set_options(*engine_, unit_, recurse, [&](auto& options) { options.after_forward = after; });
}

void FSDPModule::set_reshard_after_backward(bool reshard_after_backward, bool recurse) {
  set_options(*engine_, unit_, recurse, [&](auto& options) { options.reshard_after_backward = reshard_after_backward; });
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  engine_->units()[unit_]->place.prefetch[static_cast<std::size_t>(engine::Pass::kForward)] = indices_of(*engine_, modules);
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  engine_->units()[unit_]->place.prefetch[static_cast<std::size_t>(engine::Pass::kBackward)] = indices_of(*engine_, modules);
}

void FSDPModule::scale_gradients(double factor) {
  const at::NoGradGuard no_grad;
  engine_->main().check_parameters();
  engine_->main().finish_gradient_sync();
  for (const auto& unit : engine_->units()) {
    if (!unit->main_gradient.valid) continue;
    for (auto& gradient : unit->main_gradient.parts) gradient.mul_(factor);
  }
}

std::vector<Shard> FSDPModule::parameter_shards() const {
  engine_->main().flush_writes();
  engine_->main().expose();
  Ordered<Shard> shards;
  for (const auto& unit : engine_->units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      const auto slice = unit->slice(i, unit->shard_pieces());
      shards.add(parameter.position, {.name = parameter.name,
                                      .value = unit->main.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel),
                                      .shape = parameter.shape,
                                      .offset = slice.parameter_offset,
                                      .global_shape = parameter.global_shape,
                                      .global_offset = parameter.global_offset});
    }
  }
  return shards.take();
}

std::vector<Shard> FSDPModule::gradient_shards() const {
  engine_->main().check_parameters();
  engine_->main().finish_gradient_sync();
  Ordered<Shard> shards;
  for (const auto& unit : engine_->units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      const auto slice = unit->slice(i, unit->shard_pieces());
      Shard shard{.name = parameter.name,
                  .value = {},
                  .shape = parameter.shape,
                  .offset = slice.parameter_offset,
                  .global_shape = parameter.global_shape,
                  .global_offset = parameter.global_offset};
      if (parameter.has_gradient) {
        const auto gradient = unit->main_gradient.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel);
        // The tensor owns the memory, so a gradient that a user keeps can be read after zero_grad().
        shard.value = tensor_over(gradient.data_ptr(), {slice.numel}, gradient.options(), [memory = unit->main_gradient.memory](void*) {});
      }
      shards.add(parameter.position, std::move(shard));
    }
  }
  return shards.take();
}

NamedTensors FSDPModule::full_parameters() const {
  const at::NoGradGuard no_grad;
  engine_->main().flush_writes();
  Ordered<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& unit : engine_->units()) {
    const auto main = engine_->main().gather_main(*unit, unit->main.parts);
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      tensors.add(unit->parameters[i].position, {unit->parameters[i].name, unit->whole_parameter(main, i).clone()});
    }
  }
  return tensors.take();
}

NamedTensors FSDPModule::full_gradients() const {
  const at::NoGradGuard no_grad;
  engine_->main().check_parameters();
  engine_->main().finish_gradient_sync();
  Ordered<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& unit : engine_->units()) {
    std::vector<at::Tensor> gradients;
    if (unit->main_gradient.valid) gradients = engine_->main().gather_main(*unit, unit->main_gradient.parts);
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      tensors.add(parameter.position,
                  {parameter.name, parameter.has_gradient ? unit->whole_parameter(gradients, i).clone() : at::Tensor()});
    }
  }
  return tensors.take();
}

std::optional<MixedPrecisionPolicy> FSDPModule::mixed_precision() const { return engine_->units()[unit_]->options.mixed_precision; }

MemoryStats FSDPModule::memory_stats() const { return engine_->accounting().stats(); }
void FSDPModule::reset_peak_memory_stats() { engine_->accounting().reset_peaks(); }

WireStats FSDPModule::wire_stats() const {
  WireStats sum;
  for (const auto* communicator : engine::communicators_of(engine_->units())) engine::add(sum, engine::stats_of(communicator->stats()));
  for (const auto* communicator : comm::joined_rows_of(engine_->options().mesh)) engine::add(sum, engine::stats_of(communicator->stats()));
  return sum;
}

void FSDPModule::reset_wire_stats() {
  for (auto* communicator : engine::communicators_of(engine_->units())) communicator->reset_stats();
  for (auto* communicator : comm::joined_rows_of(engine_->options().mesh)) communicator->reset_stats();
}

FSDPModule handle(const torch::nn::Module& module) {
  auto [engine, unit] = api::Registry::instance().find(module);
  if (!engine)
    throw Error("module '" + module.name() + "' is not a unit of a sharded model; call fsdp::fully_shard on it or its root first");
  return FSDPModule(std::move(engine), unit);
}

MemoryStats memory_stats(const torch::nn::Module& module) { return handle(module).memory_stats(); }

NoSync::NoSync(const torch::nn::Module& module) : engine_(handle(module).engine()) {
  paging::PagedModel::of(*engine_).validated = false;
  for (const auto& unit : engine_->units()) {
    found_.push_back(unit->options.requires_gradient_sync);
    unit->options.requires_gradient_sync = false;
  }
}

NoSync::~NoSync() {
  for (std::size_t i = 0; i < found_.size(); ++i) engine_->units()[i]->options.requires_gradient_sync = found_[i];
}

}  // namespace fsdp
