#include "shard/model_draft.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <iomanip>
#include <limits>
#include <numeric>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/classic_stream.h"
#include "base/rounded_blocks.h"
#include "base/text.h"
#include "base/trap_key.h"
#include "comm/communicator.h"
#include "fsdp/deferred_init.h"
#include "fsdp/error.h"
#include "paging/paged_storage.h"
#include "shard/initial_values.h"

namespace fsdp::shard {
namespace {

void validate(const std::string& name, const at::Tensor& parameter, c10::Device device) {
  const auto fail = [&](const std::string& what) { throw Error("parameter '" + name + "' " + what); };
  const bool deferred = is_deferred(parameter);
  if (parameter.key_set().has(kTrapKey) && !deferred) {
    fail("is sharded already; call fully_shard once, on the root, with a `units` predicate, or fully_unshard first");
  }
  if (parameter.layout() != at::kStrided) fail("is not dense; only dense parameters can be sharded");
  if (parameter.device() != device && !deferred && !device.is_meta()) {  // A plan reads no values.
    fail("is on " + parameter.device().str() + ", the mesh on " + device.str() + "; move the module there before fully_shard");
  }
  if (parameter.requires_grad() && !parameter.is_floating_point()) {
    fail(std::string("has dtype ") + c10::toString(parameter.scalar_type()) +
         " and requires a gradient; gradients are reduced for real floating-point dtypes only: freeze it");
  }
}

/// Throws Error for different parameters over the same bytes, because sharding would separate them.
void refuse_overlaps(const std::vector<UnitPlan>& plans) {
  struct Range {
    const void* storage;  // identifies a parameter without memory, which has no address
    std::uintptr_t begin;
    std::uintptr_t end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const auto& plan : plans) {
    for (const auto& [name, parameter] : plan.parameters) {
      if (parameter.numel() == 0) continue;
      const void* storage = is_deferred(parameter) || parameter.is_meta() ? parameter.storage().unsafeGetStorageImpl() : nullptr;
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
DeviceMesh tensor_parallel_mesh(const std::vector<UnitPlan>& plans, const FullyShardOptions& options) {
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

/// Returns an empty text if everything has the parameter's own dtype.
std::string describe(const engine::SubBufferFormat& format, at::ScalarType own) {
  std::string text;
  if (!(format == engine::SubBufferFormat{.compute = own, .main = own, .main_gradient = own, .wire_gradient = own})) {
    text = ", dtypes";
    for (const auto dtype : {format.compute, format.main, format.main_gradient, format.wire_gradient})
      text += std::string(" ") + c10::toString(dtype);
    if (format.gather) text += engine::describe(*format.gather);
  }
  return text;
}

const std::optional<GradCommFormat>& grad_comm_format(const UnitSettings& settings, const FullyShardOptions& options) {
  return settings.grad_comm_format ? settings.grad_comm_format : options.grad_comm_format;
}

/// Describes those settings of a unit that the descriptions of its parameters do not contain.
std::string describe(const UnitSettings& settings, const FullyShardOptions& options) {
  ClassicStream<std::ostringstream> text;
  text << std::setprecision(std::numeric_limits<double>::max_digits10) << "mesh";
  for (const auto& dim : settings.mesh.dims()) text << " " << dim.name << "=" << dim.size;
  text << ", gradient_divide_factor " << settings.gradient_divide_factor << ", reshard_after_forward "
       << settings.reshard_after_forward.value_or(options.reshard_after_forward);
  const auto& policy = settings.mixed_precision ? settings.mixed_precision : options.mixed_precision;
  if (policy) {
    text << ", output_dtype " << (policy->output_dtype ? c10::toString(*policy->output_dtype) : "as it is") << ", cast_forward_inputs "
         << policy->cast_forward_inputs;
  }
  if (const auto& format = grad_comm_format(settings, options)) text << ", gradients in " << fsdp::describe(*format);
  return text.str();
}

/// Describes of which whole a parameter is a part, for ranks that hold parts of the same size.
std::string describe_piece(const std::string& name, const at::Tensor& parameter, const FullyShardOptions& options) {
  const auto piece = options.tensor_parallel ? options.tensor_parallel(name, parameter) : std::nullopt;
  if (!piece) return "";
  const auto& row = piece->mesh.dims().front();
  return ", a tensor-parallel piece along dimension " + std::to_string(piece->dim) + " over " + row.name + "=" + std::to_string(row.size);
}

/// Describes the parameters for ranks that hold other parts. Sizes along the divided dimension may differ.
std::string describe_pieces(const std::vector<UnitPlan>& plans, const FullyShardOptions& options) {
  ClassicStream<std::ostringstream> text;
  for (const auto& plan : plans) {
    for (const auto& [name, parameter] : plan.parameters) {
      const auto piece = options.tensor_parallel(name, parameter);
      text << "unit '" << shown(plan.name) << "': parameter '" << name << "' [";
      for (std::int64_t dim = 0; dim < parameter.dim(); ++dim) {
        text << (dim == 0 ? "" : ", ") << (piece && piece->dim == dim ? "cut" : std::to_string(parameter.size(dim)));
      }
      text << "] " << c10::toString(parameter.scalar_type()) << (parameter.requires_grad() ? "" : ", frozen") << "\n";
    }
  }
  return text.str();
}

std::string describe(const std::optional<MemoryBudget>& budget) {
  if (!budget) return "";
  const auto& [optimizer, order, activations, microbatches, syncs] = budget->planned;
  auto text =
      ", memory_budget " + std::to_string(budget->bytes) + ", planned with optimizer " + std::to_string(static_cast<int>(optimizer));
  text += ", microbatches " + std::to_string(microbatches) + (syncs ? ", each synchronized" : "");
  for (const auto& [unit, bytes] : activations) text += ", activations of '" + unit + "' " + std::to_string(bytes);
  for (const auto& [unit, bytes] : budget->recomputable) text += ", '" + unit + "' recomputable with " + std::to_string(bytes);
  for (const auto* pass : {&order.forward, &order.backward}) {
    for (const auto& unit : *pass) text += (pass == &order.forward ? ", forward of '" : ", backward of '") + unit + "'";
  }
  return text;
}

std::string describe(const std::vector<UnitPlan>& plans, const FullyShardOptions& options) {
  ClassicStream<std::ostringstream> text;
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
       << options.report_nan_in_param_grad << ", check_initial_values " << options.check_initial_values << describe(options.memory_budget)
       << "\n";
  for (const auto& plan : plans) {
    if (plan.parameters.empty()) text << "unit '" << shown(plan.name) << "': no parameters\n";
    for (const auto& [name, parameter] : plan.parameters) {
      const auto granularity = options.granularity ? options.granularity(name, parameter) : Granularity{};
      text << "unit '" << shown(plan.name) << "': parameter '" << name << "' " << parameter.sizes() << " "
           << c10::toString(parameter.scalar_type()) << (parameter.requires_grad() ? "" : ", frozen") << ", granularity "
           << static_cast<int>(granularity.kind) << "/" << granularity.block
           << describe(format_of(name, parameter, options, plan.settings), parameter.scalar_type())
           << describe_piece(name, parameter, options) << "\n";
    }
  }
  // Settings come after all parameters, so that an error about different units shows the parameters.
  const bool alike =
      !options.unit_settings && !options.mixed_precision && !options.grad_comm_format;  // The description of the options is enough.
  for (std::size_t k = 0; k < plans.size() && !alike; ++k) {
    const auto& plan = plans[k];
    text << "unit '" << shown(plan.name) << "': " << describe(plan.settings, options) << "\n";
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

/// `encloses`: whether other units lie within it.
UnitDraft draft_unit(const UnitPlan& plan, bool encloses, const FullyShardOptions& options,
                     const std::unordered_map<std::string, std::size_t>& positions) {
  std::vector<layout::ParameterTraits> specs;
  std::vector<engine::UnitParameter> parameters;
  std::vector<engine::SubBufferFormat> kinds;  // Parameters share a sub-buffer only if all dtypes of their lives are the same.
  std::vector<engine::SubBufferFormat> kinds_of_large;
  for (const auto& [name, parameter] : plan.parameters) {
    const auto format = format_of(name, parameter, options, plan.settings);
    auto kind = std::find(kinds.begin(), kinds.end(), format);
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), format);
    auto key = static_cast<std::int32_t>(kind - kinds.begin());
    // [Large parameters do not wait] Each has a sub-buffer of its own.
    if (encloses && parameter.numel() * static_cast<std::int64_t>(c10::elementSize(format.compute)) >= engine::reduced_alone()) {
      kinds_of_large.push_back(format);
      key = -static_cast<std::int32_t>(kinds_of_large.size());
    }
    const auto block = format.gather ? format.gather->block : 1;
    specs.push_back({.name = name,
                     .shape = parameter.sizes().vec(),
                     .dtype = key,
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
  for (const auto& part : layout.sub_buffers()) {
    formats.push_back(part.dtype < 0 ? kinds_of_large[static_cast<std::size_t>(-part.dtype - 1)]
                                     : kinds[static_cast<std::size_t>(part.dtype)]);
  }
  engine::check_formats(shown(plan.name), formats, options.placements);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& part = layout.sub_buffers()[layout.positions()[i].sub_buffer];
    const auto& gather = formats[layout.positions()[i].sub_buffer].gather;
    if (gather && part.quantum % gather->block != 0) {
      throw Error("parameter '" + parameters[i].name + "' may be cut every " + std::to_string(part.quantum) +
                  " elements by its granularity, but travels in blocks of " + std::to_string(gather->block) +
                  " by its gather format; give it element granularity, or rows or blocks that hold whole blocks of the format");
    }
  }
  engine::check_grad_comm(grad_comm_format(plan.settings, options), parameters, layout, formats);
  return {std::move(parameters), std::move(layout), std::move(formats)};
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
  if (options.memory_budget && options.memory_budget->bytes < 1) {
    throw Error("memory_budget " + std::to_string(options.memory_budget->bytes) +
                " bytes; give how many bytes of its device a rank may use, as parse_size(\"60GiB\")");
  }
  if (options.memory_budget) {
    for (const auto* bytes : {&options.memory_budget->planned.activations, &options.memory_budget->recomputable}) {
      for (const auto& [unit, count] : *bytes) {
        if (count >= 0) continue;
        throw Error(std::string("memory_budget: ") + (bytes == &options.memory_budget->recomputable ? "recomputable" : "activations") +
                    " gives unit '" + unit + "' " + std::to_string(count) + " bytes; give 0 or more");
      }
    }
  }
  if (options.memory_budget && options.keep_gathered_bytes != 0) {
    throw Error("memory_budget chooses what stays gathered, and keep_gathered_bytes " + std::to_string(options.keep_gathered_bytes) +
                " sets it by hand; give one of them");
  }
  if (options.check_initial_values && options.initial_values != InitialValues::kOwn) {
    throw Error("check_initial_values compares the ranks' own values, which only InitialValues::kOwn takes; leave it out");
  }
  if (options.reshard_after_forward_size != 0 && placements != Placements::optim_grads_params()) {
    throw Error("reshard_after_forward_size needs placements optim_grads_params: with others, parameters stay whole after forward");
  }
}

void validate(const UnitPlan& plan) {
  const double factor = plan.settings.gradient_divide_factor;
  if (factor >= 0 && std::isfinite(factor)) return;
  throw Error("unit '" + shown(plan.name) + "': gradient_divide_factor " + std::to_string(factor) +
              "; give a positive number, or 0 for the number of ranks");
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

void place_pieces(std::vector<engine::UnitParameter>& parameters, const UnitPlan& plan, const FullyShardOptions& options,
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

/// The types of the modules below the root, each once, as the predicate sees them.
std::string types_below(const torch::nn::Module& root) {
  constexpr std::size_t kMost = 10;
  std::vector<std::string> types;
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    if (std::find(types.begin(), types.end(), item.value()->name()) == types.end()) types.push_back(item.value()->name());
  }
  return first_names(types, kMost);
}

/// True if the predicate accepts a module that is a unit already. The root is left out, because predicates need not expect a module without
/// a name.
bool accepts_a_unit(const torch::nn::Module& root, const UnitPredicate& units) {
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    if (units(item.key(), *item.value())) return true;
  }
  try {
    return units("", root);
  } catch (const std::exception&) {
    return false;
  }
}

/// Returns a warning if the given rules make no unit.
std::string warn_of_idle_rules(const torch::nn::Module& root, const FullyShardOptions& options, const std::vector<UnitPlan>& plans) {
  std::string text;
  const auto groups =
      std::count_if(options.unit_groups.begin(), options.unit_groups.end(), [](const auto& group) { return !group.empty(); });
  const bool made_none = static_cast<std::ptrdiff_t>(plans.size()) == 1 + groups;
  if (options.units && made_none && !accepts_a_unit(root, options.units)) {
    const auto types = types_below(root);
    text = "FullyShardOptions::units accepts no module, so that it makes no units, and what is in no other unit is gathered at once. " +
           (types.empty() ? "There are none below the root" : "The modules below the root are of the types " + types);
  }
  const auto is_empty = [](const auto& group) { return group.empty(); };
  if (std::any_of(options.unit_groups.begin(), options.unit_groups.end(), is_empty)) {
    text += std::string(text.empty() ? "" : ". ") + "FullyShardOptions::unit_groups has a group without modules, which makes no unit";
  }
  return text;
}

}  // namespace

void draft_model(const torch::nn::Module& module, const FullyShardOptions& options, ModelDraft& draft) {
  validate(options);
  draft.plans = divide(module, {options.units, options.unit_groups, options.ignore});
  draft.warning = warn_of_idle_rules(module, options, draft.plans);
  draft.tensor_parallel = tensor_parallel_mesh(draft.plans, options);
  for (auto& plan : draft.plans) {
    if (options.unit_settings) {
      const auto name = plan.modules.size() == 1 ? plan.name : plan.name.substr(0, plan.name.find('+'));
      plan.settings = options.unit_settings(name, *plan.modules[0]);
    }
    if (!plan.settings.mesh.defined()) plan.settings.mesh = options.mesh;
    validate(plan);
    validate(plan.settings.mesh, options);
    for (const auto& [name, parameter] : plan.parameters) validate(name, parameter, options.mesh.device());
  }
  refuse_overlaps(draft.plans);
  std::unordered_map<std::string, std::size_t> positions;
  for (const auto& item : module.named_parameters()) positions.emplace(item.key(), positions.size());
  std::set<std::size_t> enclosing;
  for (const auto& plan : draft.plans) enclosing.insert(plan.parent);
  for (std::size_t k = 0; k < draft.plans.size(); ++k) {
    draft.units.push_back(draft_unit(draft.plans[k], enclosing.contains(k), options, positions));
  }
  draft.description = describe(draft.plans, options) + describe(module, options);
  if (draft.tensor_parallel.defined()) draft.pieces = describe_pieces(draft.plans, options);
}

engine::UnitOptions unit_options(const UnitPlan& plan, const FullyShardOptions& options, const engine::UnitCommunicators& communicators) {
  engine::UnitOptions unit_options;
  unit_options.placements = options.placements;
  unit_options.outer_sharded_optimizer = options.outer_placements == Placements::optim() && communicators.outer != nullptr;
  const bool reshards = plan.settings.reshard_after_forward.value_or(options.reshard_after_forward);
  unit_options.after_forward = reshards ? engine::AfterForward::kReshard : engine::AfterForward::kUntilBackward;
  unit_options.mixed_precision = plan.settings.mixed_precision ? plan.settings.mixed_precision : options.mixed_precision;
  unit_options.gradient_divide_factor = plan.settings.gradient_divide_factor;
  unit_options.grad_comm_format = grad_comm_format(plan.settings, options);
  unit_options.offload = options.offload;
  return unit_options;
}

void place_pieces(ModelDraft& draft, const FullyShardOptions& options) {
  for (std::size_t k = 0; k < draft.plans.size(); ++k) {
    place_pieces(draft.units[k].parameters, draft.plans[k], options, draft.tensor_parallel);
  }
}

}  // namespace fsdp::shard
