// The handle's methods: what users ask of the engine.

#include <torch/torch.h>

#include <algorithm>

#include "comm/communicator.h"
#include "engine/engine.h"
#include "fsdp/fully_shard.h"

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

comm::Communicator* communicator_of(const engine::Engine& engine) { return engine.units().front()->communicator.get(); }

}  // namespace

void FSDPModule::unshard() { engine_->unshard(*engine_->units()[unit_]); }
void FSDPModule::reshard() { engine_->reshard(*engine_->units()[unit_]); }
void FSDPModule::set_requires_gradient_sync(bool sync) { engine_->set_requires_gradient_sync(sync); }
void FSDPModule::set_prefetch_depth(int depth) { engine_->set_prefetch_depth(depth); }
void FSDPModule::reset() { engine_->reset(); }
void FSDPModule::zero_grad() { engine_->zero_grad(); }
void FSDPModule::main_parameters_changed() { engine_->main_parameters_changed(); }

void FSDPModule::set_reshard_after_forward(bool reshard_after_forward) {
  for (const auto& unit : engine_->units()) unit->options.reshard_after_forward = reshard_after_forward;
}

std::vector<Shard> FSDPModule::parameter_shards() const {
  engine_->flush_writes();
  Ordered<Shard> shards;
  for (const auto& unit : engine_->units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      const auto slice = unit->owned_slice(i);
      shards.add(parameter.position, {.name = parameter.name,
                                      .value = unit->main[slice.sub_buffer].narrow(0, slice.offset, slice.numel),
                                      .shape = parameter.shape,
                                      .offset = slice.parameter_offset});
    }
  }
  return shards.take();
}

std::vector<Shard> FSDPModule::gradient_shards() const {
  Ordered<Shard> shards;
  for (const auto& unit : engine_->units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      const auto slice = unit->owned_slice(i);
      Shard shard{.name = parameter.name, .value = {}, .shape = parameter.shape, .offset = slice.parameter_offset};
      if (parameter.has_gradient) {
        const auto gradient = unit->main_gradient[slice.sub_buffer].narrow(0, slice.offset, slice.numel);
        // Holds the memory: what a user keeps stays readable after zero_grad().
        shard.value = at::from_blob(
            gradient.data_ptr(), {slice.numel}, [memory = unit->main_gradient_memory](void*) {}, gradient.options());
      }
      shards.add(parameter.position, std::move(shard));
    }
  }
  return shards.take();
}

NamedTensors FSDPModule::full_parameters() const {
  const torch::NoGradGuard no_grad;
  engine_->flush_writes();
  Ordered<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& unit : engine_->units()) {
    const bool was_present = unit->state == engine::ParameterState::kPresent;
    engine_->unshard(*unit);
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      tensors.add(unit->parameters[i].position, {unit->parameters[i].name, unit->whole(i).clone()});
    }
    if (!was_present) engine_->reshard(*unit);
  }
  return tensors.take();
}

NamedTensors FSDPModule::full_gradients() const {
  const torch::NoGradGuard no_grad;
  Ordered<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& unit : engine_->units()) {
    std::vector<at::Tensor> whole = unit->main_gradient;
    if (unit->main_gradient_valid && !unit->replicated_optimizer()) {
      std::vector<comm::GatherPiece> pieces;
      for (auto& part : whole) {
        const at::Tensor shard = part;
        part = at::empty({shard.numel() * unit->layout.world_size()}, shard.options());
        pieces.push_back({.full = part, .shard = shard});
      }
      unit->communicator->all_gather(pieces, {.operation = "all-gather of gradients", .unit = unit->name})->wait();
    }
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      const auto& placement = unit->layout.placements()[i];
      at::Tensor value;
      if (parameter.has_gradient) {
        value = whole[placement.sub_buffer].narrow(0, placement.offset, placement.numel).view(parameter.shape).clone();
      }
      tensors.add(parameter.position, {parameter.name, value});
    }
  }
  return tensors.take();
}

MemoryStats FSDPModule::memory_stats() const { return engine_->accounting().stats(); }
void FSDPModule::reset_peak_memory_stats() { engine_->accounting().reset_peaks(); }

WireStats FSDPModule::wire_stats() const {
  const auto& stats = communicator_of(*engine_)->stats();
  return {.all_gather_bytes = stats.all_gather_bytes,
          .reduce_scatter_bytes = stats.reduce_scatter_bytes,
          .control_bytes = stats.control_bytes,
          .all_gathers = stats.all_gathers,
          .reduce_scatters = stats.reduce_scatters};
}

void FSDPModule::reset_wire_stats() { communicator_of(*engine_)->reset_stats(); }

}  // namespace fsdp
