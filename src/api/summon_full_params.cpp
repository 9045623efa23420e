#include "fsdp/summon_full_params.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <iostream>

#include "comm/communicator.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "paging/paged_storage.h"

namespace fsdp {
namespace {

bool is_first_rank(const engine::Unit& unit) { return unit.communicators.gather->rank() == 0 && unit.communicators.outer_rank() == 0; }

/// Calls `fn` with those parameters of the unit that still exist.
void for_each_parameter(const engine::Unit& unit, const std::function<void(const at::Tensor& parameter, std::size_t index)>& fn) {
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    if (const auto tensor = unit.parameters[i].tensor.lock()) fn(at::Tensor(tensor), i);
  }
}

/// Copies the values of a parameter that was given other memory while it was exposed, as torch::load does.
void take_values(const at::Tensor& parameter, const at::Tensor& whole, const std::string& name) {
  if (parameter.is_alias_of(whole)) return;
  if (parameter.sizes() != whole.sizes()) {
    std::cerr << c10::str("fsdp: within SummonFullParams, parameter '", name, "' of shape ", whole.sizes(), " was given a value of shape ",
                          parameter.sizes(), ", which is dropped\n")
              << std::flush;
    return;
  }
  if (parameter.scalar_type() != whole.scalar_type()) {
    TORCH_WARN("fsdp: within SummonFullParams, parameter '", name, "' was converted to ", parameter.scalar_type(),
               "; its value is taken over, but its dtype stays ", whole.scalar_type());
  }
  const at::NoGradGuard no_grad;
  at::Tensor(whole).copy_(parameter.detach());
}

}  // namespace

SummonFullParams::SummonFullParams(torch::nn::Module& module, SummonOptions options) : writeback_(options.writeback) {
  if (options.rank0_only && options.writeback) {
    throw Error(
        "SummonFullParams: what rank 0 alone has written can't be kept, as the others would keep what they had; set writeback to false");
  }
  if (torch::autograd::get_current_graph_task_id() != -1) throw Error("SummonFullParams inside of a backward; wait for its end");
  for (const auto& parameter : module.parameters(options.recurse)) {
    const auto* storage = paging::PagedStorage::of(parameter);
    if (storage == nullptr || storage->unit == nullptr) continue;
    const auto known = [&](const Summoned& other) { return other.unit == storage->unit; };
    if (std::none_of(summoned_.begin(), summoned_.end(), known)) {
      summoned_.push_back({.engine = storage->engine->shared_from_this(), .unit = storage->unit, .whole = {}});
    }
  }
  if (summoned_.empty()) {
    throw Error("SummonFullParams: module '" + module.name() + "' has no sharded parameters" +
                (options.recurse ? "" : " of its own (recurse is false)") +
                "; call fsdp::fully_shard on it or its root first, and end the scope of other guards that show the same parameters");
  }
  const at::NoGradGuard no_grad;
  const c10::InferenceMode no_inference(false);  // the parameters are to be ordinary tensors
  try {
    for (auto& [engine, unit, whole] : summoned_) {
      auto gathered = engine->main().summon(*unit);
      if (options.rank0_only && !is_first_rank(*unit)) continue;
      whole = std::move(gathered);
      for (const auto& part : whole) {
        engine->accounting().add(memory::Kind::kGatheredParameters, static_cast<std::int64_t>(part.nbytes()));
      }
      for_each_parameter(*unit, [&unit = *unit, &whole = whole](const at::Tensor& parameter, std::size_t i) {
        paging::show(parameter, unit.whole_parameter(whole, i));
      });
    }
  } catch (...) {
    dismiss();
    throw;
  }
}

SummonFullParams::~SummonFullParams() { dismiss(); }

void SummonFullParams::dismiss() noexcept {
  for (const auto& [engine, unit, whole] : summoned_) {
    try {
      if (!whole.empty()) {
        for_each_parameter(*unit, [&, &unit = *unit, &whole = whole](const at::Tensor& parameter, std::size_t i) {
          if (writeback_) take_values(parameter, unit.whole_parameter(whole, i), unit.parameters[i].name);
          paging::hide(parameter, unit, i);
        });
      }
      for (const auto& part : whole) {
        engine->accounting().remove(memory::Kind::kGatheredParameters, static_cast<std::int64_t>(part.nbytes()));
      }
      engine->main().dismiss(*unit, writeback_ ? std::span<const at::Tensor>(whole) : std::span<const at::Tensor>());
    } catch (const std::exception& error) {
      std::cerr << std::string(error.what()) + "\n"
                << std::flush;  // a destructor can't throw; the group that failed fails every later collective
    }
  }
}

}  // namespace fsdp
