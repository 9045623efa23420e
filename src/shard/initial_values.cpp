#include "shard/initial_values.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/any_strides.h"
#include "base/text.h"
#include "base/trap_key.h"
#include "comm/communicator.h"
#include "comm/mesh/ranks.h"
#include "deferred/deferred_init.h"
#include "engine/tensor_bytes.h"
#include "fsdp/error.h"
#include "paging/paged_storage.h"

namespace fsdp::shard {
namespace {

using engine::Pieces;
using engine::Unit;

bool is_first_rank(const Unit& unit) { return unit.communicators.gather->rank() == 0 && unit.communicators.outer_rank() == 0; }

at::Tensor main_of(const Unit& unit, const Unit::MainSlice& slice) {
  return unit.main.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel);
}

void fill_from_own(Unit& unit, std::span<const at::Tensor> parameters, std::int64_t summed, std::vector<std::int64_t>& checksums) {
  deferred::for_each_value(parameters, [&](std::size_t i, const at::Tensor& value) {
    checksums[i] = engine::checksum(value, summed);
    const auto flat = value.reshape({-1});
    if (unit.state() == engine::ParameterState::kPresent) {  // Replicated, and main parameters are regions of the whole ones.
      const auto& position = unit.layout.positions()[i];
      unit.whole.buffer.parts[position.sub_buffer].narrow(0, position.offset, position.numel).copy_(flat);
    } else {
      const auto slice = unit.main_slice(i);
      main_of(unit, slice).copy_(flat.narrow(0, slice.parameter_offset, slice.numel));
    }
  });
}

/// Returns the options for a parameter's values on the unit's device.
at::TensorOptions options_of(const Unit& unit, const at::Tensor& parameter) {
  return at::TensorOptions().dtype(parameter.scalar_type()).device(unit.whole.buffer.storage.device());
}

/// The values of a unit's flattened parameters that lie in a rank's pieces.
struct PieceValues {
  Pieces pieces;
  std::vector<at::Tensor> values;  ///< For each parameter, its values that lie in `pieces`, on the unit's device.
};

/// Rank 0 of the row sends each rank of the row those of its values that lie in the pieces that `pieces_of` returns.
template <typename PiecesOf>
PieceValues scatter(const Unit& unit, std::span<const at::Tensor> parameters, const PieceValues& held, comm::Communicator& row,
                    const PiecesOf& pieces_of) {
  PieceValues received{.pieces = pieces_of(row.rank()), .values = {}};
  std::vector<comm::ScatterPart> messages;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto& [parts, into] = messages.emplace_back();
    const auto slice_in = [&](Pieces pieces) { return unit.layout.local_slice(i, pieces.first, pieces.count); };
    if (row.rank() == 0) {
      const auto begin = slice_in(held.pieces).parameter_offset;
      for (int rank = 0; rank < row.size(); ++rank) {
        const auto slice = slice_in(pieces_of(rank));
        parts.push_back(held.values[i].narrow(0, slice.numel == 0 ? 0 : slice.parameter_offset - begin, slice.numel));
      }
      into = parts.front();
    } else {
      into = at::empty({slice_in(received.pieces).numel}, options_of(unit, parameters[i]));
    }
    received.values.push_back(into);
  }
  row.scatter(messages, 0, unit.label("scatter of first values"))->wait();
  return received;
}

/// Sends values along the inner dimension first. Each inner rank then passes on its values along the outer dimension, to the ranks that
/// replicate or divide them.
void fill_from_first_rank(Unit& unit, std::span<const at::Tensor> parameters) {
  std::exception_ptr failure;
  PieceValues held{.pieces = unit.all_pieces(), .values = {}};
  if (is_first_rank(unit)) {
    held.values.resize(parameters.size());
    try {
      deferred::for_each_value(parameters, [&](std::size_t i, const at::Tensor& value) {
        held.values[i] = row_major(value.to(unit.whole.buffer.storage.device())).view({-1});
      });
    } catch (...) {
      // The other ranks wait for this one, so it takes part nevertheless.
      failure = std::current_exception();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        held.values[i] = at::zeros({parameters[i].numel()}, options_of(unit, parameters[i]));
      }
    }
  }
  const std::int64_t outer_size = unit.communicators.outer_size();
  if (unit.communicators.outer_rank() == 0) {
    held = scatter(unit, parameters, held, *unit.communicators.gather, [&](std::int64_t inner) {
      return unit.replicated_optimizer() ? unit.all_pieces() : Pieces{inner * outer_size, outer_size};
    });
  }
  if (unit.communicators.outer) {
    const auto inner = unit.replicated_optimizer() ? unit.all_pieces() : unit.inner_pieces();
    held = scatter(unit, parameters, held, *unit.communicators.outer, [&](std::int64_t outer) {
      return unit.options.outer_sharded_optimizer ? Pieces{inner.first + outer, 1} : inner;
    });
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) main_of(unit, unit.main_slice(i)).copy_(held.values[i]);
  // The rest of replicated parameters is gathered at the first use.
  if (!unit.replicated_optimizer()) unit.set_state(engine::ParameterState::kSharded);
  if (failure) std::rethrow_exception(failure);
}

/// Returns, for each unit, the buffers and ignored parameters of its modules that belong to no unit within it.
std::vector<std::vector<at::Tensor>> buffers_by_unit(const std::vector<UnitPlan>& plans) {
  std::vector<std::vector<at::Tensor>> buffers(plans.size());
  std::unordered_set<const c10::TensorImpl*> seen;
  for (std::size_t k = plans.size(); k-- > 0;) {  // Enclosing units come first.
    const auto add = [&](const at::Tensor& tensor) {
      if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) buffers[k].push_back(tensor);
    };
    for (const auto* module : plans[k].modules) {
      for (const auto& buffer : module->buffers()) add(buffer);
      for (const auto& parameter : module->parameters()) {
        if (!parameter.defined() || paging::PagedStorage::of(parameter) == nullptr) add(parameter);
      }
    }
  }
  return buffers;
}

void send_buffers(const std::vector<at::Tensor>& buffers, const Unit& unit, comm::Communicator& row) {
  std::vector<comm::ScatterPart> messages;
  for (const auto& buffer : buffers) {
    auto& [parts, into] = messages.emplace_back();
    const auto options = buffer.options().device(unit.whole.buffer.storage.device());
    into = row.rank() == 0 ? row_major(buffer.to(options.device())).view({-1}) : at::empty({buffer.numel()}, options);
    if (row.rank() == 0) parts.assign(static_cast<std::size_t>(row.size()), into);
  }
  row.scatter(messages, 0, unit.label("scatter of buffers"))->wait();
  if (row.rank() == 0) return;
  for (std::size_t i = 0; i < buffers.size(); ++i) assign_values(buffers[i], messages[i].into);
}

}  // namespace

void fill_main(Unit& unit, const UnitPlan& plan, const FullyShardOptions& options, std::vector<std::int64_t>& checksums) {
  std::vector<at::Tensor> parameters;
  for (const auto& [name, parameter] : plan.parameters) parameters.push_back(parameter);
  const c10::impl::ExcludeDispatchKeyGuard untrapped(kTrapKey);
  checksums.assign(parameters.size(), 0);
  const auto summed = options.check_initial_values ? 0 : engine::kSampledElements;
  if (options.initial_values == InitialValues::kOwn) fill_from_own(unit, parameters, summed, checksums);
  if (options.initial_values == InitialValues::kFromRank0) fill_from_first_rank(unit, parameters);
}

void expect_same_values(const UnitPlan& plan, const std::vector<std::int64_t>& checksums) {
  const auto& mesh = plan.settings.mesh;
  std::vector<std::int64_t> line = {mesh.rank()};
  line.insert(line.end(), checksums.begin(), checksums.end());
  const auto columns = static_cast<std::int64_t>(line.size());
  const auto all =
      comm::Ranks(mesh).exchange(at::tensor(line, at::kLong), {.operation = "comparison of first values", .unit = shown(plan.name)});
  const auto* values = all.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 1; i < columns; ++i) {
    for (std::int64_t row = 1; row < all.size(0); ++row) {
      if (values[row * columns + i] == values[i]) continue;
      throw Error("check_initial_values: rank " + std::to_string(values[0]) + " and rank " + std::to_string(values[row * columns]) +
                  " began with different values of parameter '" + plan.parameters[static_cast<std::size_t>(i - 1)].first + "' of unit '" +
                  shown(plan.name) +
                  "'. Seed all ranks alike before the model is made (torch::manual_seed), or pass InitialValues::kFromRank0.");
    }
  }
}

void fill_buffers(const std::vector<UnitPlan>& plans, const std::vector<std::unique_ptr<Unit>>& units, InitialValues from) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard untrapped(kTrapKey);
  const auto buffers = buffers_by_unit(plans);
  std::exception_ptr failure;
  for (std::size_t k = 0; k < buffers.size(); ++k) {
    if (buffers[k].empty()) continue;
    const auto& unit = *units[k];
    const auto device = unit.whole.buffer.storage.device();
    if (from != InitialValues::kFromRank0 || is_first_rank(unit)) {
      try {
        deferred::give_values(buffers[k], device);
      } catch (...) {
        failure = std::current_exception();
      }
    }
    deferred::give_zeros(buffers[k], device);
    if (from != InitialValues::kFromRank0) continue;
    if (unit.communicators.outer_rank() == 0) send_buffers(buffers[k], unit, *unit.communicators.gather);
    if (unit.communicators.outer) send_buffers(buffers[k], unit, *unit.communicators.outer);
  }
  if (failure) std::rethrow_exception(failure);
}

std::string describe(const torch::nn::Module& root, const FullyShardOptions& options) {
  auto text = "initial_values " + std::to_string(static_cast<int>(options.initial_values)) + "\n";
  if (options.initial_values != InitialValues::kFromRank0) return text;
  const auto add = [&](const std::string& what, const at::Tensor& tensor) {
    if (tensor.layout() != at::kStrided) throw Error(what + " is not dense, and can't be sent by InitialValues::kFromRank0; use kOwn");
    text += what + " " + in_brackets(tensor.sizes()) + " " + c10::toString(tensor.scalar_type()) + "\n";
  };
  for (const auto& item : root.named_buffers()) {
    if (item.value().defined()) add("buffer '" + item.key() + "'", item.value());
  }
  for (const auto& item : root.named_parameters()) {
    if (item.value().defined() && options.ignore && options.ignore(item.key(), item.value())) {
      add("ignored parameter '" + item.key() + "'", item.value());
    }
  }
  return text;
}

}  // namespace fsdp::shard
