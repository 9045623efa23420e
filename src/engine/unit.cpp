#include "engine/unit.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <utility>

#include "base/rounded_blocks.h"
#include "base/stable_hash.h"
#include "base/text.h"
#include "comm/call.h"
#include "comm/parts.h"
#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

constexpr const char* kSharded =
    "this parameter's memory is freed while its unit is sharded: keep clone() of it or of its part, not the parameter or a view, or let "
    "the unit stay gathered after forward (reshard_after_forward=False); to read an address, as torch::save does, call unshard() first";

bool is_alone(const UnitOptions& options, const std::vector<SubBufferFormat>& formats, const UnitCommunicators& communicators) {
  const bool computes_with_main =
      std::all_of(formats.begin(), formats.end(), [](const SubBufferFormat& format) { return format.gathers_main() && !format.extended; });
  const bool has_all = communicators.gather->is_alone() && !options.outer_sharded_optimizer && communicators.post_forward == nullptr;
  return has_all && computes_with_main && options.offload != Offload::kAll;
}

}  // namespace

void check_grad_comm(const std::optional<GradCommFormat>& format, std::span<const UnitParameter> parameters,
                     const layout::UnitLayout& layout, std::span<const SubBufferFormat> formats) {
  if (!format) return;
  check_format(*format);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].trainable || formats[layout.positions()[i].sub_buffer].wire_gradient != at::kDouble) continue;
    throw Error("grad_comm_format rounds fp32, bfloat16 and half, but gradients of parameter '" + parameters[i].name +
                "' are sent in float64; choose another reduce dtype, or leave the format out");
  }
}

std::vector<comm::Communicator*> communicators_of(std::span<const std::unique_ptr<Unit>> units) {
  std::vector<comm::Communicator*> once;
  for (const auto& unit : units) {
    const auto& [gather, reduce, outer, post_forward] = unit->communicators;
    for (auto* communicator : {gather.get(), reduce.get(), outer.get(), post_forward.get()}) {
      if (communicator != nullptr && std::find(once.begin(), once.end(), communicator) == once.end()) once.push_back(communicator);
    }
  }
  return once;
}

UnitCommunicators communicators_of(const DeviceMesh& mesh, bool separate_reduce_group, std::int64_t post_forward) {
  const auto& inner = mesh.dims().back().name;
  UnitCommunicators communicators;
  communicators.gather = mesh.communicator(inner);
  communicators.reduce = separate_reduce_group ? mesh.second_communicator(inner) : communicators.gather;
  if (mesh.dims().size() == 2 && mesh.dims().front().size > 1) communicators.outer = mesh.communicator(mesh.dims().front().name);
  if (post_forward != 0) communicators.post_forward = mesh.second_communicator(inner, post_forward);
  return communicators;
}

Unit::Unit(std::string name_, std::vector<UnitParameter> parameters_, layout::UnitLayout layout_, std::vector<SubBufferFormat> formats_,
           UnitOptions options_, UnitCommunicators communicators_, c10::Storage storage)
    : name(std::move(name_)),
      parameters(std::move(parameters_)),
      layout(std::move(layout_)),
      formats(std::move(formats_)),
      options(options_),
      alone(is_alone(options_, formats, communicators_)),
      communicators(std::move(communicators_)) {
  const at::NoGradGuard no_grad;
  if (alone) options.placements = Placements::no_shard();
  const auto device = storage.device();
  const auto all = layout.sub_buffers().size();
  const auto trainable = layout.trainable_sub_buffers();
  const auto numel = [&](std::size_t k, std::int64_t pieces) { return layout.sub_buffers()[k].shard_numel * pieces; };
  const auto empty = [&] { return memory::empty_storage(device); };
  const auto inner = inner_pieces().count;
  const auto world = layout.world_size();

  lay_out(whole.buffer, std::move(storage), all, [&](std::size_t k) {
    return formats[k].extended ? Part{} : Part{formats[k].compute, numel(k, world)};
  });
  whole.free();
  lay_out(whole.wire, empty(), all, [&](std::size_t k) {
    return formats[k].gather ? Part{at::kByte, travelling_numel(k) * world} : Part{};
  });
  if (communicators.post_forward) {
    const auto kept = world / communicators.post_forward->size();
    lay_out(whole.post_forward, empty(), all, [&](std::size_t k) { return Part{formats[k].compute, numel(k, kept)}; });
  }
  if (options.outer_sharded_optimizer) {
    lay_out(shards.buffer, empty(), all, [&](std::size_t k) {
      return Part{formats[k].gather ? at::kByte : formats[k].compute, travelling_numel(k) * inner};
    });
  }
  const auto empty_main = [&] { return memory::empty_storage(offloaded() ? memory::host_of(device) : device); };
  lay_out(main.buffer, empty_main(), all, [&](std::size_t k) {
    return main_is_shared(k) || formats[k].extended ? Part{} : Part{formats[k].main, numel(k, main_pieces().count)};
  });
  for (std::size_t k = 0; k < all; ++k) {
    if (!main_is_shared(k)) {
      main.parts.push_back(main.buffer.parts[k]);
    } else if (replicated_parameters()) {
      main.parts.push_back(region(whole.buffer.parts[k], all_pieces(), main_pieces()));
    } else {
      main.parts.push_back(region(shards.buffer.parts[k], inner_pieces(), main_pieces()));
    }
  }

  const auto held = replicated_gradients() ? all_pieces() : main_pieces();
  lay_out(main_gradient.buffer, empty_main(), trainable, [&](std::size_t k) {
    return Part{formats[k].main_gradient, numel(k, held.count)};
  });
  for (const auto& part : main_gradient.buffer.parts) main_gradient.parts.push_back(region(part, held, main_pieces()));
  rename(std::move(name), {});
}

comm::Label Unit::label(const char* operation) const {
  std::uint64_t switches = 0;
  int bit = 0;
  const auto add = [&](bool on) { switches |= std::uint64_t{on} << bit++; };  // in the order of kSwitches
  add(options.requires_gradient_sync);
  add(options.requires_all_reduce);
  add(options.reshards_after_forward());
  add(options.reshard_after_backward);
  add(place.facts == nullptr || place.facts->is_last_backward);
  add(place.facts != nullptr && place.facts->manual_finalization);
  return {
      .operation = operation,
      .unit = name,
      .model = place.model,
      .facts = {.layout = layout_hash, .switches = switches, .divide_factor = std::bit_cast<std::uint64_t>(options.gradient_divide_factor)},
      .updates = place.facts == nullptr ? std::string_view() : std::string_view(place.facts->updates)};
}

std::string Unit::describe() const {
  std::string text;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    const auto& format = formats[layout.positions()[i].sub_buffer];
    text += "unit '" + name + "': parameter '" + parameter.name + "' " + in_brackets(parameter.shape) + " " +
            c10::toString(parameter.dtype) + (parameter.trainable ? "" : ", frozen") + ", dtypes";
    for (const auto dtype : {format.compute, format.main, format.main_gradient, format.wire_gradient})
      text.append(" ").append(c10::toString(dtype));
    if (format.gather) text += engine::describe(*format.gather);
    if (format.extended) text += ", gathered by itself";
    if (options.grad_comm_format) text += ", gradients in " + fsdp::describe(*options.grad_comm_format);
    text += "\n";
  }
  return text;
}

void Unit::rename(std::string unit, std::vector<std::string> parameter_names) {
  name = std::move(unit);
  for (std::size_t i = 0; i < parameter_names.size(); ++i) parameters[i].name = std::move(parameter_names[i]);
  layout_hash = stable_hash(describe());
  const auto add = [&](std::int64_t value) { layout_hash = mix(layout_hash, static_cast<std::uint64_t>(value)); };
  for (const auto& position : layout.positions()) {
    add(static_cast<std::int64_t>(position.sub_buffer));
    add(position.offset);
  }
  for (const auto& part : layout.sub_buffers()) add(part.shard_numel);
}

std::int64_t Unit::travelling_numel(std::size_t k) const {
  const auto& format = formats[k].gather;
  const auto numel = layout.sub_buffers()[k].shard_numel;
  return format ? numel / format->block * format->block_bytes : numel;
}

bool Unit::sends_differences() const {
  return std::any_of(formats.begin(), formats.end(), [](const SubBufferFormat& format) { return format.sends_differences(); });
}

// A difference is taken to the unsharded parameters, so what an operator changed in them could not be told from what rounding has left.
void Unit::check_writable() const {
  if (!sends_differences()) return;
  throw Error("an operator writes to parameters of unit '" + name +
              "', whose gather format sends differences to them; write to its main parameters, while SummonFullParams exposes them, or "
              "read addresses by const_data_ptr()");
}

bool Unit::has_separate_main() const {
  return offloaded() || std::any_of(formats.begin(), formats.end(), [](const SubBufferFormat& format) { return !format.gathers_main(); });
}

Pieces Unit::main_pieces() const {
  if (options.outer_sharded_optimizer) return own_pieces();
  return replicated_optimizer() ? all_pieces() : inner_pieces();
}

std::string describe(const GatherFormat& format) {
  auto text = ", gathered in " + std::to_string(format.block_bytes) + " bytes per " + std::to_string(format.block);
  if (!format.settings.empty()) text += " (" + format.settings + ")";
  return text;
}

void check_formats(const std::string& unit, const std::vector<SubBufferFormat>& formats, const Placements& placements) {
  const bool differences = std::any_of(formats.begin(), formats.end(), [](const auto& format) { return format.sends_differences(); });
  if (!differences || placements == Placements::optim() || placements == Placements::optim_grads()) return;
  throw Error("unit '" + unit +
              "': its gather format sends differences to what all ranks have of the last gather, so unsharded parameters must stay from "
              "step to step, and main parameters must be sharded; give placements optim_grads or optim, or another gather format");
}

at::Tensor region(const at::Tensor& tensor, Pieces held, Pieces pieces) {
  if (pieces.count == held.count) return tensor;
  const std::int64_t piece = tensor.numel() / held.count;
  return comm::flat_view(tensor, (pieces.first - held.first) * piece, pieces.count * piece);
}

void WholeParameters::free() {
  auto& impl = *buffer.storage.unsafeGetStorageImpl();
  // A profiler that records inputs asks for their addresses before the operator has gathered them. It gets null, and so does code that asks
  // for the address of parameters without elements, which no gather changes.
  if (at::hasCallbacks() || buffer.bytes == 0) {
    memory::detach(impl);
  } else {
    memory::detach(impl, kSharded);
  }
  buffer.slot.release();
}

at::Tensor Unit::whole_parameter(std::span<const at::Tensor> sub_buffers, std::size_t parameter) const {
  const auto& position = layout.positions()[parameter];
  return sub_buffers[position.sub_buffer].narrow(0, position.offset, position.numel).view(parameters[parameter].shape);
}

Unit::MainSlice Unit::slice(std::size_t parameter, Pieces pieces) const {
  const auto sub_buffer = layout.positions()[parameter].sub_buffer;
  const auto local = layout.local_slice(parameter, pieces.first, pieces.count);
  const std::int64_t base = (pieces.first - main_pieces().first) * layout.sub_buffers()[sub_buffer].shard_numel;
  return {sub_buffer, local.numel == 0 ? 0 : base + local.shard_offset, local.numel, local.parameter_offset};
}

double Unit::gradient_scale() const {
  const auto ranks = communicators.gather->size() * communicators.outer_size();
  return 1.0 / (options.gradient_divide_factor == 0 ? static_cast<double>(ranks) : options.gradient_divide_factor);
}

void Unit::allocate_main(memory::Accounting& accounting) {
  const auto device = whole.buffer.storage.device();
  const auto allocate = [&](Buffer& buffer, at::Tensor& memory, memory::Kind kind) {
    if (!memory.defined()) {
      RECORD_USER_SCOPE(memory::allocation_range(kind));
      memory =
          kind == memory::Kind::kHost ? memory::host_zeros(device, buffer.bytes, options.host_memory) : memory::zeros(device, buffer.bytes);
    }
    memory::attach(*buffer.storage.unsafeGetStorageImpl(), memory.data_ptr(), buffer.bytes);
    accounting.add(kind, buffer.bytes);
  };
  allocate(main.buffer, main.memory, offloaded() ? memory::Kind::kHost : memory::Kind::kMainParameters);
  if (options.outer_sharded_optimizer) {
    allocate(shards.buffer, shards.memory, memory::Kind::kGatheredParameters);
    shards.outdated = true;
  }
  if (replicated_parameters()) {
    allocate(whole.buffer, whole.memory, alone ? memory::Kind::kMainParameters : memory::Kind::kGatheredParameters);
    // Replicated parameters that every rank fills by itself are present at once; copies in another dtype are made at the first use.
    set_state(has_separate_main() ? ParameterState::kSharded : ParameterState::kPresent);
    whole.is_base = false;  // The memory may be new.
  }
}

void Unit::set_state(ParameterState state) {
  const bool legal = state == ParameterState::kSharded || (state == ParameterState::kGathering && state_ == ParameterState::kSharded) ||
                     (state == ParameterState::kPresent && (state_ == ParameterState::kGathering || replicated_parameters()));
  if (!legal) {
    throw Error("internal: unit '" + name + "' can't go from parameter state " + std::to_string(static_cast<int>(state_)) + " to " +
                std::to_string(static_cast<int>(state)));
  }
  state_ = state;
}

bool may_follow(UseState now, UseState next) {
  switch (next) {
    case UseState::kUnused:
    case UseState::kPinned:
    case UseState::kInUse:
    case UseState::kAttended:
      return true;
    case UseState::kRepeated:
      return now != UseState::kInUse;
    case UseState::kListed:
      return now != UseState::kInUse && now != UseState::kRepeated && now != UseState::kPinned && now != UseState::kAttended;
    case UseState::kLeft:
    case UseState::kKept:
      return now == UseState::kInUse || now == UseState::kRepeated || now == UseState::kUnused;
  }
  return false;
}

bool encloses(const Unit& outer, const Unit& inner) {
  for (const Unit* unit = &inner; unit != nullptr; unit = unit->place.parent) {
    if (unit == &outer) return true;
  }
  return false;
}

namespace {

std::atomic<std::int64_t> bytes_reduced_alone = std::int64_t{8} << 20;

}  // namespace

std::int64_t reduced_alone() { return bytes_reduced_alone.load(std::memory_order_relaxed); }

void set_reduced_alone(std::int64_t bytes) { bytes_reduced_alone = bytes; }

bool related(const Unit& a, const Unit& b) {
  const auto has_called = [](const Unit& caller, const Unit& unit) {
    return std::find(caller.place.called.begin(), caller.place.called.end(), &unit) != caller.place.called.end();
  };
  return encloses(a, b) || encloses(b, a) || has_called(a, b) || has_called(b, a);
}

}  // namespace fsdp::engine
