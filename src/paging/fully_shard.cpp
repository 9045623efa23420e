#include "fsdp/fully_shard.h"

#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "comm/communicator.h"
#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"
#include "paging/paged_storage.h"
#include "paging/unit_division.h"

namespace fsdp {
namespace {

using engine::Engine;
using engine::Unit;

/// Which modules are units of which engine. Engines are held by their parameters' hooks, not from here: an entry outlives its
/// model harmlessly and is swept later.
class Registry {
 public:
  static Registry& instance() {
    static Registry registry;
    return registry;
  }

  void add(const torch::nn::Module* module, const std::shared_ptr<Engine>& engine, std::size_t unit) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return entry.second.engine.expired(); });
    entries_[module] = {engine, unit};
  }

  std::pair<std::shared_ptr<Engine>, std::size_t> find(const torch::nn::Module* module) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(module);
    if (found == entries_.end()) return {};
    return {found->second.engine.lock(), found->second.unit};
  }

  void remove(const std::shared_ptr<Engine>& engine) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [&](const auto& entry) { return entry.second.engine.lock() == engine; });
  }

 private:
  struct Entry {
    std::weak_ptr<Engine> engine;
    std::size_t unit = 0;
  };
  std::mutex mutex_;  // models may be sharded from several threads
  std::unordered_map<const torch::nn::Module*, Entry> entries_;
};

std::string shown(const std::string& unit_name) { return unit_name.empty() ? "(root)" : unit_name; }

void validate(const std::string& name, const at::Tensor& parameter, c10::Device device) {
  const auto fail = [&](const std::string& what) { throw Error("parameter '" + name + "' " + what); };
  if (parameter.key_set().has(paging::kPagedKey)) {
    fail("is sharded already; call fully_shard once, on the root, with a `units` predicate, or fully_unshard first");
  }
  if (parameter.layout() != at::kStrided) fail("is not dense; only dense parameters can be sharded");
  if (parameter.device() != device) {
    fail("is on " + parameter.device().str() + ", the mesh on " + device.str() + "; move the module there before fully_shard");
  }
  if (parameter.requires_grad() && !parameter.is_floating_point()) {
    fail(std::string("has dtype ") + c10::toString(parameter.scalar_type()) +
         " and requires a gradient; gradients are reduced for real floating-point dtypes only: freeze it");
  }
}

/// Different parameters over the same bytes would be torn apart by sharding.
void refuse_overlaps(const std::vector<paging::UnitPlan>& plans) {
  struct Range {
    std::uintptr_t begin;
    std::uintptr_t end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const auto& plan : plans) {
    for (const auto& [name, parameter] : plan.parameters) {
      if (parameter.numel() == 0) continue;
      const auto begin = reinterpret_cast<std::uintptr_t>(parameter.const_data_ptr());
      std::int64_t span = 1;
      for (std::int64_t dim = 0; dim < parameter.dim(); ++dim) span += (parameter.size(dim) - 1) * parameter.stride(dim);
      ranges.push_back({begin, begin + static_cast<std::uintptr_t>(span) * parameter.element_size(), &name});
    }
  }
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin < ranges[i - 1].end) {
      throw Error("parameters '" + *ranges[i - 1].name + "' and '" + *ranges[i].name +
                  "' share memory without being the same tensor; register one tensor under both names to tie them, or clone one");
    }
  }
}

std::string describe(const std::vector<paging::UnitPlan>& plans, const FullyShardOptions& options) {
  std::ostringstream text;
  const auto& placements = options.placements;
  text << "placements " << static_cast<int>(placements.parameters) << static_cast<int>(placements.gradients)
       << static_cast<int>(placements.optimizer) << ", reshard_after_forward " << options.reshard_after_forward << ", prefetch_depth "
       << options.prefetch_depth << "\n";
  for (const auto& plan : plans) {
    if (plan.parameters.empty()) text << "unit '" << shown(plan.name) << "': no parameters\n";
    for (const auto& [name, parameter] : plan.parameters) {
      const auto granularity = options.granularity ? options.granularity(name, parameter) : Granularity{};
      text << "unit '" << shown(plan.name) << "': parameter '" << name << "' " << parameter.sizes() << " "
           << c10::toString(parameter.scalar_type()) << (parameter.requires_grad() ? "" : ", frozen") << ", granularity "
           << static_cast<int>(granularity.kind) << "/" << granularity.block << "\n";
    }
  }
  return text.str();
}

void copy_values(Unit& unit, const paging::UnitPlan& plan, memory::Accounting& accounting) {
  const auto& layout = unit.layout;
  if (unit.replicated_parameters()) {
    unit.main_memory = memory::zeros(unit.storage.device(), layout.full_bytes());
    memory::attach(*unit.storage.unsafeGetStorageImpl(), unit.main_memory.data_ptr(), layout.full_bytes());
    unit.state = engine::ParameterState::kPresent;
    accounting.add(memory::Kind::kGatheredParameters, layout.full_bytes());
  } else {
    unit.main_memory = memory::zeros(unit.storage.device(), layout.shard_bytes());
    accounting.add(memory::Kind::kMainParameters, layout.shard_bytes());
  }
  for (std::size_t k = 0; k < layout.sub_buffers().size(); ++k) {
    const auto& part = layout.sub_buffers()[k];
    if (!unit.replicated_parameters()) {
      unit.main.push_back(unit.main_memory.narrow(0, part.shard_byte_offset, part.shard_numel * part.itemsize)
                              .view(static_cast<at::ScalarType>(part.dtype)));
    } else {
      unit.main.push_back(unit.replicated_optimizer() ? unit.full[k] : unit.own_region(unit.full[k], k));
    }
  }
  for (std::size_t i = 0; i < plan.parameters.size(); ++i) {
    const auto flat = plan.parameters[i].second.detach().reshape({-1});
    if (unit.replicated_parameters()) {
      const auto& placement = layout.placements()[i];
      unit.full[placement.sub_buffer].narrow(0, placement.offset, placement.numel).copy_(flat);
    } else {
      const auto slice = unit.owned_slice(i);
      unit.main[slice.sub_buffer].narrow(0, slice.offset, slice.numel).copy_(flat.narrow(0, slice.parameter_offset, slice.numel));
    }
  }
}

std::unique_ptr<Unit> make_unit(const paging::UnitPlan& plan, const FullyShardOptions& options,
                                const std::shared_ptr<comm::Communicator>& communicator,
                                const std::unordered_map<std::string, std::size_t>& positions) {
  std::vector<layout::ParameterSpec> specs;
  std::vector<engine::UnitParameter> parameters;
  for (const auto& [name, parameter] : plan.parameters) {
    specs.push_back({.name = name,
                     .shape = parameter.sizes().vec(),
                     .dtype = static_cast<std::int32_t>(parameter.scalar_type()),
                     .itemsize = static_cast<std::int64_t>(parameter.element_size()),
                     .trainable = parameter.requires_grad(),
                     .granularity = options.granularity ? options.granularity(name, parameter) : Granularity{}});
    engine::UnitParameter entry;
    entry.name = name;
    entry.position = positions.at(name);
    entry.shape = parameter.sizes().vec();
    entry.dtype = parameter.scalar_type();
    entry.trainable = parameter.requires_grad();
    entry.tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(parameter.getIntrusivePtr());
    parameters.push_back(std::move(entry));
  }
  auto storage = c10::make_intrusive<paging::PagedStorage>(options.mesh.device());
  auto unit =
      std::make_unique<Unit>(shown(plan.name), std::move(parameters), layout::UnitLayout(std::move(specs), communicator->size()),
                             engine::UnitOptions{.placements = options.placements, .reshard_after_forward = options.reshard_after_forward},
                             communicator, c10::Storage(storage));
  storage->unit = unit.get();
  // The storage may outlive the unit in a graph or a view: it then knows that nobody can fill it any more.
  unit->trigger = std::shared_ptr<void>(storage.get(), [](void* pointer) {
    auto* orphan = static_cast<paging::PagedStorage*>(pointer);
    orphan->unit = nullptr;
    orphan->engine = nullptr;
  });
  return unit;
}

void validate(const FullyShardOptions& options) {
  const auto& placements = options.placements;
  if (placements != Placements::no_shard() && placements != Placements::optim() && placements != Placements::optim_grads() &&
      placements != Placements::optim_grads_params()) {
    throw Error(
        "these placements have no meaning on a 1-D mesh: what is sharded must include what depends on it; choose "
        "no_shard, optim, optim_grads or optim_grads_params");
  }
  if (options.prefetch_depth < 0) {
    throw Error("prefetch_depth " + std::to_string(options.prefetch_depth) + "; give 0 (no read-ahead) or more");
  }
}

}  // namespace

FSDPModule fully_shard(torch::nn::Module& module, FullyShardOptions options) {
  const torch::NoGradGuard no_grad;
  if (!options.mesh.defined()) options.mesh = init_device_mesh("cpu", {{"dp_shard", -1}});
  if (options.mesh.dims().size() != 1) {
    throw Error("fully_shard needs a 1-D mesh, this one has " + std::to_string(options.mesh.dims().size()) +
                " dimensions; pass one of them, as in mesh[\"dp_shard\"]");
  }
  const auto communicator = options.mesh.communicator(options.mesh.dims().front().name);

  // What this rank refuses, it tells the others, which would wait for it. Until all agree, nothing has changed.
  std::vector<paging::UnitPlan> plans;
  std::vector<std::unique_ptr<Unit>> units;
  std::string description;
  std::exception_ptr refusal;
  try {
    validate(options);
    plans = paging::divide(module, options.units);
    for (const auto& plan : plans) {
      for (const auto& [name, parameter] : plan.parameters) validate(name, parameter, options.mesh.device());
    }
    refuse_overlaps(plans);
    std::unordered_map<std::string, std::size_t> positions;
    for (const auto& item : module.named_parameters()) positions.emplace(item.key(), positions.size());
    for (const auto& plan : plans) units.push_back(make_unit(plan, options, communicator, positions));
    description = describe(plans, options);
  } catch (const std::exception& error) {
    refusal = std::current_exception();
    description = std::string("refused: ") + error.what();
  }
  communicator->expect_equal(description, {.operation = "fully_shard", .unit = "(model)"});
  if (refusal) std::rethrow_exception(refusal);

  const auto engine = std::make_shared<Engine>(options.mesh.device(), options.prefetch_depth);
  for (std::size_t k = 0; k < plans.size(); ++k) {
    auto& plan = plans[k];
    auto& unit = engine->add(std::move(units[k]));
    if (plan.parent != paging::UnitPlan::kNoParent) unit.parent = engine->units()[plan.parent].get();
    static_cast<paging::PagedStorage*>(unit.storage.unsafeGetStorageImpl())->engine = engine.get();
    copy_values(unit, plan, engine->accounting());
    // Frees the original memory unit by unit, unless somebody else holds it.
    for (std::size_t i = 0; i < plan.parameters.size(); ++i) paging::page(plan.parameters[i].second, engine, unit, i);
    Registry::instance().add(plan.module, engine, k);
  }
  return FSDPModule(engine, 0);
}

FSDPModule handle(const torch::nn::Module& module) {
  auto [engine, unit] = Registry::instance().find(&module);
  if (!engine)
    throw Error("module '" + module.name() + "' is not a unit of a sharded model; call fsdp::fully_shard on it or its root first");
  return FSDPModule(std::move(engine), unit);
}

void fully_unshard(torch::nn::Module& module) {
  const auto engine = handle(module).engine();
  engine->flush_writes();
  for (const auto& unit : engine->units()) {
    engine->unshard(*unit);
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto tensor = unit->parameters[i].tensor.lock();
      if (tensor) paging::unpage(at::Tensor(tensor), unit->whole(i).clone());
    }
    engine->reshard(*unit);
  }
  engine->retire();
  Registry::instance().remove(engine);
}

MemoryStats memory_stats(const torch::nn::Module& module) { return handle(module).memory_stats(); }

}  // namespace fsdp
