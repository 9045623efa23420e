// The C++ trigger: an operator that takes a paged parameter, or a view of one, arrives here first.
//
// A boxed fallback on kTrapKey sees every such operator in forward and backward. It asks the engine to make the units present, then
// redispatches below the key; operators called inside of it see the key excluded, as their arguments' units stay present throughout.
// The key has a second meaning, for the same fallback: inside of deferred_init all operators of the thread arrive here, and later those
// that take what it made. They are recorded.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>

#include "base/no_autocast_cache.h"
#include "base/trap_key.h"
#include "deferred/deferred_record.h"
#include "deferred/deferred_storage.h"
#include "fsdp/error.h"
#include "paging/backward.h"
#include "paging/paged_storage.h"

namespace fsdp::paging {
namespace {

/// What an operator's arguments hold of paged units.
struct Touched {
  struct Use {
    engine::Engine* engine;
    engine::Unit* unit;
    bool written;
  };
  c10::SmallVector<Use, 4> uses;  // each unit once
  bool all_in_use = true;
  bool deferred = false;  ///< A tensor that deferred_init made is among them.
};

void visit(const at::Tensor& tensor, bool writes, engine::Phase phase, Touched& touched) {
  if (!tensor.defined() || !tensor.key_set().has(kTrapKey) || !tensor.has_storage()) return;
  auto* storage = PagedStorage::from(tensor.storage().unsafeGetStorageImpl());
  if (storage == nullptr) {
    touched.deferred = touched.deferred || deferred::DeferredStorage::of(tensor) != nullptr;
    return;
  }
  auto* unit = storage->unit;
  if (unit == nullptr) throw Error("a parameter of a model that fully_shard had sharded is used after the model is gone");
  touched.all_in_use = touched.all_in_use && unit->in_use(phase) && storage->engine->follows_current_stream();
  for (auto& use : touched.uses) {
    if (use.unit != unit) continue;
    use.written = use.written || writes;
    return;
  }
  touched.uses.push_back({storage->engine, unit, writes});
}

void visit(const c10::IValue& value, bool writes, engine::Phase phase, Touched& touched) {
  if (value.isTensor()) {
    visit(value.toTensor(), writes, phase, touched);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor, writes, phase, touched);
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) visit(element, writes, phase, touched);
  }
}

/// Operators that hand on the tensor itself need no unit: taking `parameter.detach()` gathers nothing. (Views proper do: their kernels
/// check the storage's size.)
bool reads_nothing(const c10::OperatorHandle& op) {
  const std::string_view name = op.schema().name();
  return name == "aten::detach" || name == "aten::alias";
}

/// Tells each engine of its units: an operator may take parameters of several sharded models (a moving average of weights).
void enter(const Touched& touched, engine::Phase phase) {
  c10::SmallVector<engine::Engine*, 2> told;
  for (const auto& first : touched.uses) {
    if (std::find(told.begin(), told.end(), first.engine) != told.end()) continue;
    told.push_back(first.engine);
    c10::SmallVector<engine::Unit*, 4> units;
    for (const auto& use : touched.uses) {
      if (use.engine == first.engine) units.push_back(use.unit);
    }
    watch_backward(first.engine->shared_from_this());
    first.engine->enter({units.data(), units.size()}, phase);
  }
}

/// What forward was in when backward began is in use as far as the engine knows, until it knows of the backward.
bool backward_is_watched(const Touched& touched) {
  return torch::autograd::get_current_graph_task_id() == -1 ||
         std::all_of(touched.uses.begin(), touched.uses.end(), [](const auto& use) { return use.engine->in_backward(); });
}

void trap(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  Touched touched;
  const auto phase = current_phase();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    visit(values[i], alias != nullptr && alias->isWrite(), phase, touched);
  }
  if (!reads_nothing(op) && (!touched.all_in_use || !backward_is_watched(touched))) enter(touched, phase);
  if (touched.deferred || c10::impl::tls_local_dispatch_key_set().included_.has(kTrapKey)) {
    deferred::record(op, stack);
  } else {
    // Autocast keeps copies of the weights that it casts until its outermost scope ends: of a sharded model they would be all parameters,
    // present at once, and those of before an update.
    const NoAutocastCache no_cache(keys.has_any(c10::autocast_dispatch_keyset));
    const c10::impl::ExcludeDispatchKeyGuard below(kTrapKey);
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTrapKey), stack);
  }
  for (const auto& use : touched.uses) {
    if (use.written) use.engine->wrote(*use.unit);
  }
}

}  // namespace

// `_` means every operator.
TORCH_LIBRARY_IMPL(_, DeferredInit, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&trap>()); }

}  // namespace fsdp::paging
