#include "fsdp/fully_shard.h"

#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "comm/communicator.h"
#include "comm/exception_text.h"
#include "fsdp/deferred_init.h"
#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"
#include "paging/deferred_record.h"
#include "paging/initial_values.h"
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
  const bool deferred = is_deferred(parameter);
  if (parameter.key_set().has(paging::kPagedKey) && !deferred) {
    fail("is sharded already; call fully_shard once, on the root, with a `units` predicate, or fully_unshard first");
  }
  if (parameter.layout() != at::kStrided) fail("is not dense; only dense parameters can be sharded");
  if (parameter.device() != device && !deferred) {
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
    const void* storage;  // of a parameter without memory, which has no address
    std::uintptr_t begin;
    std::uintptr_t end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const auto& plan : plans) {
    for (const auto& [name, parameter] : plan.parameters) {
      if (parameter.numel() == 0) continue;
      const void* storage = is_deferred(parameter) ? parameter.storage().unsafeGetStorageImpl() : nullptr;
      const auto begin = storage != nullptr ? static_cast<std::uintptr_t>(parameter.storage_offset()) * parameter.element_size()
                                            : reinterpret_cast<std::uintptr_t>(parameter.const_data_ptr());
      std::int64_t span = 1;
      for (std::int64_t dim = 0; dim < parameter.dim(); ++dim) span += (parameter.size(dim) - 1) * parameter.stride(dim);
      ranges.push_back({storage, begin, begin + static_cast<std::uintptr_t>(span) * parameter.element_size(), &name});
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return std::pair(a.storage, a.begin) < std::pair(b.storage, b.begin); });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].storage == ranges[i - 1].storage && ranges[i].begin < ranges[i - 1].end) {
      throw Error("parameters '" + *ranges[i - 1].name + "' and '" + *ranges[i].name +
                  "' share memory without being the same tensor; register one tensor under both names to tie them, or clone one");
    }
  }
}

/// The policy's dtypes for one parameter; integers and the like keep their own.
engine::SubBufferFormat format_of(const std::string& name, const at::Tensor& parameter, const FullyShardOptions& options,
                                  const UnitSettings& settings) {
  const auto own = parameter.scalar_type();
  engine::SubBufferFormat format{.compute = own, .main = own, .main_gradient = own, .wire_gradient = own};
  if (!parameter.is_floating_point()) return format;
  const auto& policy = settings.mixed_precision ? settings.mixed_precision : options.mixed_precision;
  if (policy) {
    format.compute = policy->param_dtype.value_or(own);
    format.main = parameter.requires_grad() ? policy->main_params_dtype.value_or(own) : own;
    format.main_gradient = policy->main_grads_dtype.value_or(format.main);
    format.wire_gradient = policy->grad_comm_dtype.value_or(format.main_gradient);
  }
  if (options.gather_format) format.gather = options.gather_format(name, parameter);
  return format;
}

/// The mesh of the tensor-parallel pieces, if there are any.
DeviceMesh tensor_parallel_mesh(const std::vector<paging::UnitPlan>& plans, const FullyShardOptions& options) {
  DeviceMesh mesh;
  if (!options.tensor_parallel) return mesh;
  for (const auto& plan : plans) {
    for (const auto& [name, parameter] : plan.parameters) {
      const auto piece = options.tensor_parallel(name, parameter);
      if (!piece) continue;
      const auto fail = [&, &name = name](const std::string& what) { throw Error("tensor_parallel: parameter '" + name + "' " + what); };
      if (!piece->mesh.defined() || piece->mesh.dims().size() != 1) fail("needs a mesh of one dimension, as in grid[\"tp\"]");
      if (piece->dim < 0 || piece->dim >= parameter.dim()) fail("has no dimension " + std::to_string(piece->dim));
      const auto& row = piece->mesh.dims().front().name;
      if (mesh.defined() && (mesh.dims().front().name != row || mesh.communicator(row) != piece->mesh.communicator(row))) {
        fail("is on another mesh than others; pieces of one model are over the same ranks");
      }
      mesh = piece->mesh;
    }
  }
  return mesh;
}

/// Says which piece of what each tensor-parallel parameter of a unit is. Collective over that mesh.
void place_pieces(std::vector<engine::UnitParameter>& parameters, const paging::UnitPlan& plan, const FullyShardOptions& options,
                  const DeviceMesh& mesh) {
  const auto& row = mesh.dims().front().name;
  std::vector<std::pair<engine::UnitParameter*, std::size_t>> pieces;
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto piece = options.tensor_parallel(parameters[i].name, plan.parameters[i].second);
    if (!piece) continue;
    const auto dim = static_cast<std::size_t>(piece->dim);
    pieces.emplace_back(&parameters[i], dim);
    sizes.push_back(parameters[i].shape[dim]);
  }
  if (pieces.empty()) return;
  const auto all =
      mesh.communicator(row)->exchange(at::tensor(sizes, at::kLong), {.operation = "sizes of tensor-parallel pieces", .unit = "(model)"});
  const auto mine = mesh.coordinate(row);
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    auto& [parameter, dim] = pieces[p];
    const auto of_ranks = all.select(1, static_cast<std::int64_t>(p));
    parameter->tensor_parallel = true;
    parameter->global_offset[dim] = of_ranks.narrow(0, 0, mine).sum().item<std::int64_t>();
    parameter->global_shape[dim] = of_ranks.sum().item<std::int64_t>();
  }
}

/// Nothing where everything stays in the parameter's own dtype.
std::string describe(const engine::SubBufferFormat& format, at::ScalarType own) {
  std::string text;
  if (!(format == engine::SubBufferFormat{.compute = own, .main = own, .main_gradient = own, .wire_gradient = own})) {
    text = ", dtypes";
    for (const auto dtype : {format.compute, format.main, format.main_gradient, format.wire_gradient})
      text += std::string(" ") + c10::toString(dtype);
    if (format.gather)
      text += ", gathered in " + std::to_string(format.gather->block_bytes) + " bytes per " + std::to_string(format.gather->block);
  }
  return text;
}

std::string describe(const std::vector<paging::UnitPlan>& plans, const FullyShardOptions& options) {
  std::ostringstream text;
  const auto digits = [](const Placements& placements) {
    std::string text;
    for (const auto placement : {placements.parameters, placements.gradients, placements.optimizer}) {
      text += std::to_string(static_cast<int>(placement));
    }
    return text;
  };
  text << "placements " << digits(options.placements) << ", reshard_after_forward " << options.reshard_after_forward << ", prefetch_depth "
       << options.prefetch_depth << ", outer placements " << digits(options.outer_placements) << ", reshard_after_forward_size "
       << options.reshard_after_forward_size << ", separate_reduce_group " << options.separate_reduce_group << ", offload "
       << static_cast<int>(options.offload) << ", keep_gathered_bytes " << options.keep_gathered_bytes << ", report_nan_in_param_grad "
       << options.report_nan_in_param_grad << "\n";
  for (const auto& plan : plans) {
    if (plan.parameters.empty()) text << "unit '" << shown(plan.name) << "': no parameters\n";
    for (const auto& [name, parameter] : plan.parameters) {
      const auto granularity = options.granularity ? options.granularity(name, parameter) : Granularity{};
      text << "unit '" << shown(plan.name) << "': parameter '" << name << "' " << parameter.sizes() << " "
           << c10::toString(parameter.scalar_type()) << (parameter.requires_grad() ? "" : ", frozen") << ", granularity "
           << static_cast<int>(granularity.kind) << "/" << granularity.block
           << describe(format_of(name, parameter, options, plan.settings), parameter.scalar_type()) << "\n";
    }
  }
  return text.str();
}

std::int64_t narrowest_itemsize(const engine::SubBufferFormat& format) {
  std::int64_t narrowest = 16;
  for (const auto dtype : {format.compute, format.main, format.main_gradient, format.wire_gradient}) {
    narrowest = std::min(narrowest, static_cast<std::int64_t>(c10::elementSize(dtype)));
  }
  return narrowest;
}

/// A unit without process groups and memory: all that can be refused has been.
struct Draft {
  std::vector<engine::UnitParameter> parameters;
  layout::UnitLayout layout;
  std::vector<engine::SubBufferFormat> formats;
};

Draft draft_unit(const paging::UnitPlan& plan, const FullyShardOptions& options,
                 const std::unordered_map<std::string, std::size_t>& positions) {
  std::vector<layout::ParameterSpec> specs;
  std::vector<engine::UnitParameter> parameters;
  std::vector<engine::SubBufferFormat> kinds;  // Parameters share a sub-buffer only if all dtypes of their lives are the same.
  for (const auto& [name, parameter] : plan.parameters) {
    const auto format = format_of(name, parameter, options, plan.settings);
    auto kind = std::find(kinds.begin(), kinds.end(), format);
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), format);
    const auto block = format.gather ? format.gather->block : 1;
    specs.push_back({.name = name,
                     .shape = parameter.sizes().vec(),
                     .dtype = static_cast<std::int32_t>(kind - kinds.begin()),
                     .itemsize = static_cast<std::int64_t>(c10::elementSize(format.main)),
                     .trainable = parameter.requires_grad(),
                     .granularity = options.granularity ? options.granularity(name, parameter) : Granularity{},
                     .alignment = std::lcm(layout::kAlignment / narrowest_itemsize(format), block)});
    engine::UnitParameter entry;
    entry.name = name;
    entry.position = positions.at(name);
    entry.shape = parameter.sizes().vec();
    entry.global_shape = entry.shape;
    entry.global_offset.assign(entry.shape.size(), 0);
    entry.dtype = parameter.scalar_type();
    entry.trainable = parameter.requires_grad();
    entry.tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(parameter.getIntrusivePtr());
    parameters.push_back(std::move(entry));
  }
  layout::UnitLayout layout(std::move(specs), plan.settings.mesh.size());
  std::vector<engine::SubBufferFormat> formats;
  for (const auto& part : layout.sub_buffers()) formats.push_back(kinds[static_cast<std::size_t>(part.dtype)]);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& part = layout.sub_buffers()[layout.placements()[i].sub_buffer];
    const auto& gather = formats[layout.placements()[i].sub_buffer].gather;
    if (gather && part.quantum % gather->block != 0) {
      throw Error("parameter '" + parameters[i].name + "' may be cut every " + std::to_string(part.quantum) +
                  " elements by its granularity, but travels in blocks of " + std::to_string(gather->block) +
                  " by its gather format; give it element granularity, or rows or blocks that hold whole blocks of the format");
    }
  }
  return {std::move(parameters), std::move(layout), std::move(formats)};
}

std::unique_ptr<Unit> make_unit(Draft draft, const paging::UnitPlan& plan, const FullyShardOptions& options,
                                const engine::UnitGroups& groups) {
  engine::UnitOptions unit_options;
  unit_options.placements = options.placements;
  unit_options.outer_sharded_optimizer = options.outer_placements == Placements::optim() && groups.outer != nullptr;
  unit_options.reshard_after_forward = plan.settings.reshard_after_forward.value_or(options.reshard_after_forward);
  unit_options.mixed_precision = plan.settings.mixed_precision ? plan.settings.mixed_precision : options.mixed_precision;
  unit_options.gradient_divide_factor = plan.settings.gradient_divide_factor;
  unit_options.offload = options.offload;
  auto storage = c10::make_intrusive<paging::PagedStorage>(options.mesh.device());
  auto unit = std::make_unique<Unit>(shown(plan.name), std::move(draft.parameters), std::move(draft.layout), std::move(draft.formats),
                                     unit_options, groups, c10::Storage(storage));
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
        "these placements have no meaning: what is sharded must include what depends on it; choose no_shard, optim, optim_grads or "
        "optim_grads_params");
  }
  if (options.outer_placements != Placements::no_shard() && options.outer_placements != Placements::optim()) {
    throw Error(
        "these placements have no meaning on the outer dimension of a mesh: choose no_shard (HSDP) or optim (HFSDP) for outer_placements; "
        "to "
        "shard gradients or parameters over all ranks, use a 1-D mesh of them");
  }
  if (options.outer_placements == Placements::optim() && placements != Placements::optim_grads_params()) {
    throw Error(
        "outer_placements optim (HFSDP) needs placements optim_grads_params; for a sharded optimizer with replicated parameters or "
        "gradients, "
        "use a 1-D mesh of all ranks");
  }
  if (options.prefetch_depth < 0) {
    throw Error("prefetch_depth " + std::to_string(options.prefetch_depth) + "; give 0 (no read-ahead) or more");
  }
  if (options.keep_gathered_bytes < 0) {
    throw Error("keep_gathered_bytes " + std::to_string(options.keep_gathered_bytes) + "; give 0 (nothing is kept) or more");
  }
  if (options.reshard_after_forward_size != 0 && placements != Placements::optim_grads_params()) {
    throw Error("reshard_after_forward_size needs placements optim_grads_params: with others, parameters stay whole after forward");
  }
}

/// The dimensions of a unit's mesh, outermost first: the last one is sharded over.
void validate(const DeviceMesh& mesh, const FullyShardOptions& options) {
  const auto& dims = mesh.dims();
  if (dims.size() > 2) {
    throw Error("fully_shard needs a mesh with one dimension (to shard over) or two (outer, then the one to shard over); this one has " +
                std::to_string(dims.size()) + ": pass a part of it, as in mesh[\"dp_shard\"] or mesh.sub({\"dp_outer\", \"dp_shard\"})");
  }
  if (dims.size() == 1 && options.outer_placements != Placements::no_shard()) {
    throw Error("outer_placements optim needs a mesh with two dimensions, outer and inner; this one has one");
  }
  const auto kept = options.reshard_after_forward_size;
  const auto size = dims.back().size;
  if (kept != 0 && (kept <= 1 || kept >= size || size % kept != 0)) {
    throw Error("reshard_after_forward_size " + std::to_string(kept) + " must divide the " + std::to_string(size) +
                " ranks of dimension '" + dims.back().name + "' and be neither 1 (reshard_after_forward = false) nor all of them (true)");
  }
  if (options.mesh.device() != mesh.device()) throw Error("all meshes of one fully_shard must be on the same device");
}

/// Makes the process groups of each mesh once.
class GroupsOf {
 public:
  explicit GroupsOf(const FullyShardOptions& options) : options_(options) {}

  const engine::UnitGroups& operator()(const DeviceMesh& mesh) {
    const auto& inner = mesh.dims().back().name;
    const auto gather = mesh.communicator(inner);
    const auto outer = mesh.dims().size() == 2 && mesh.dims().front().size > 1 ? mesh.communicator(mesh.dims().front().name) : nullptr;
    for (const auto& made : made_) {
      if (made->gather == gather && made->outer == outer) return *made;
    }
    auto& groups = made_.emplace_back(std::make_unique<engine::UnitGroups>());
    groups->gather = gather;
    groups->outer = outer;
    groups->reduce = options_.separate_reduce_group ? mesh.new_communicator(inner) : gather;
    if (options_.reshard_after_forward_size != 0) {
      groups->post_forward = mesh.new_communicator(inner, options_.reshard_after_forward_size);
    }
    return *groups;
  }

 private:
  const FullyShardOptions& options_;
  std::vector<std::unique_ptr<engine::UnitGroups>> made_;
};

/// Does all steps, whichever of them fail, for the sake of ranks that take part in them; but a failed collective ends it.
class Steps {
 public:
  template <typename Step>
  void run(const Step& step) {
    try {
      step();
    } catch (const CommError&) {
      throw;
    } catch (...) {
      if (!failure_) text_ = comm::current_exception_text();
      if (!failure_) failure_ = std::current_exception();
    }
  }
  const std::string& text() const { return text_; }
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::exception_ptr failure_;
  std::string text_;
};

/// Compares on all ranks of a mesh: along each dimension, what an earlier one found is told to the next.
void expect_equal(const DeviceMesh& mesh, std::string description) {
  std::exception_ptr difference;
  for (auto dim = mesh.dims().rbegin(); dim != mesh.dims().rend(); ++dim) {
    try {
      mesh.communicator(dim->name)->expect_equal(description, {.operation = "fully_shard", .unit = "(model)"});
    } catch (const CommError&) {
      throw;
    } catch (const Error& error) {
      if (!difference) difference = std::current_exception();
      description = std::string("refused: ") + error.what();
    }
  }
  if (difference) std::rethrow_exception(difference);
}

}  // namespace

FSDPModule fully_shard(torch::nn::Module& module, FullyShardOptions options) {
  const torch::NoGradGuard no_grad;
  if (paging::current_session()) throw Error("fully_shard inside of deferred_init; call it on the result");
  if (!options.mesh.defined()) options.mesh = init_device_mesh("cpu", {{"dp_shard", -1}});
  // What this rank refuses, it tells the others, which would wait for it. Until all agree, nothing has changed.
  std::vector<paging::UnitPlan> plans;
  std::vector<Draft> drafts;
  std::string description;
  DeviceMesh pieces;
  std::exception_ptr refusal;
  try {
    validate(options);
    plans = paging::divide(module, {options.units, options.unit_groups, options.ignore});
    pieces = tensor_parallel_mesh(plans, options);
    for (auto& plan : plans) {
      if (options.unit_settings)
        plan.settings =
            options.unit_settings(plan.modules.size() == 1 ? plan.name : plan.name.substr(0, plan.name.find('+')), *plan.modules[0]);
      if (!plan.settings.mesh.defined()) plan.settings.mesh = options.mesh;
      validate(plan.settings.mesh, options);
      for (const auto& [name, parameter] : plan.parameters) validate(name, parameter, options.mesh.device());
    }
    refuse_overlaps(plans);
    std::unordered_map<std::string, std::size_t> positions;
    for (const auto& item : module.named_parameters()) positions.emplace(item.key(), positions.size());
    for (const auto& plan : plans) drafts.push_back(draft_unit(plan, options, positions));
    description = describe(plans, options) + paging::describe(module, options.initial_values);
  } catch (const std::exception& error) {
    refusal = std::current_exception();
    description = std::string("refused: ") + error.what();
  }
  expect_equal(options.mesh, description);
  // Pieces may differ in size, so ranks that hold other ones agree on their refusals only.
  if (pieces.defined()) expect_equal(pieces, refusal ? description : "accepted");
  if (refusal) std::rethrow_exception(refusal);
  if (pieces.defined()) {
    for (std::size_t k = 0; k < plans.size(); ++k) place_pieces(drafts[k].parameters, plans[k], options, pieces);
  }

  const auto engine = std::make_shared<Engine>(engine::EngineOptions{.mesh = options.mesh,
                                                                     .tensor_parallel = pieces,
                                                                     .prefetch_depth = options.prefetch_depth,
                                                                     .keep_gathered_bytes = options.keep_gathered_bytes,
                                                                     .report_nan_in_param_grad = options.report_nan_in_param_grad});
  GroupsOf groups_of(options);
  Steps filling;
  for (std::size_t k = 0; k < plans.size(); ++k) {
    auto& plan = plans[k];
    auto& unit = engine->add(make_unit(std::move(drafts[k]), plan, options, groups_of(plan.settings.mesh)));
    if (plan.parent != paging::UnitPlan::kNoParent) unit.parent = engine->units()[plan.parent].get();
    static_cast<paging::PagedStorage*>(unit.full.storage.unsafeGetStorageImpl())->engine = engine.get();
    unit.allocate_main(engine->accounting());
    filling.run([&] { paging::fill_main(unit, plan, options.initial_values); });
    // Frees the original memory unit by unit, unless somebody else holds it.
    for (std::size_t i = 0; i < plan.parameters.size(); ++i) paging::page(plan.parameters[i].second, engine, unit, i);
    for (const auto* unit_module : plan.modules) Registry::instance().add(unit_module, engine, k);
  }
  filling.run([&] { paging::fill_buffers(plans, engine->units(), options.initial_values); });
  expect_equal(options.mesh, filling.text());
  filling.rethrow();
  return FSDPModule(engine, 0);
}

FSDPModule handle(const torch::nn::Module& module) {
  auto [engine, unit] = Registry::instance().find(&module);
  if (!engine)
    throw Error("module '" + module.name() + "' is not a unit of a sharded model; call fsdp::fully_shard on it or its root first");
  return FSDPModule(std::move(engine), unit);
}

void fully_unshard(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  const auto engine = handle(module).engine();
  engine->flush_writes();
  for (const auto& unit : engine->units()) {
    const auto main = engine->gather_main(*unit, unit->main);
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      const auto tensor = parameter.tensor.lock();
      if (tensor) paging::unpage(at::Tensor(tensor), unit->whole(main, i).to(parameter.dtype, /*non_blocking=*/false, /*copy=*/true));
    }
    engine->reshard(*unit);
  }
  engine->retire();
  Registry::instance().remove(engine);
}

MemoryStats memory_stats(const torch::nn::Module& module) { return handle(module).memory_stats(); }

}  // namespace fsdp
