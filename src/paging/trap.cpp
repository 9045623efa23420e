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
#include <span>

#include "base/no_autocast_cache.h"
#include "base/trap_key.h"
#include "deferred/deferred_record.h"
#include "deferred/deferred_storage.h"
#include "fsdp/error.h"
#include "paging/backward.h"
#include "paging/operator_arguments.h"
#include "paging/paged_storage.h"
#include "trigger/autograd_pass.h"

namespace fsdp::paging {
namespace {

/// The paged units whose parameters are among an operator's arguments.
struct Touched {
  struct Use {
    engine::Engine* engine;
    engine::Unit* unit;
    bool written;
  };
  c10::SmallVector<Use, 4> uses;  // each unit once
  bool deferred = false;          ///< A tensor that deferred_init made is among them.
};

void visit(const at::Tensor& tensor, bool writes, Touched& touched) {
  if (!tensor.defined() || !tensor.key_set().has(kTrapKey) || !tensor.has_storage()) return;
  auto* storage = PagedStorage::from(tensor.storage().unsafeGetStorageImpl());
  if (storage == nullptr) {
    touched.deferred = touched.deferred || deferred::DeferredStorage::of(tensor) != nullptr;
    return;
  }
  auto* unit = storage->unit;
  if (unit == nullptr) throw Error("a parameter of a model that fully_shard had sharded is used after the model is gone");
  for (auto& use : touched.uses) {
    if (use.unit != unit) continue;
    use.written = use.written || writes;
    return;
  }
  touched.uses.push_back({storage->engine, unit, writes});
}

void visit(const c10::IValue& value, bool writes, Touched& touched) {
  if (value.isTensor()) {
    visit(value.toTensor(), writes, touched);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor, writes, touched);
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) visit(element, writes, touched);
  }
}

/// Throws Error if a sharded parameter itself, not a view of it, is about to get other memory, which updates and checkpoints would not
/// notice.
void refuse_other_memory(at::ArrayRef<c10::IValue> values) {
  const auto& parameter = values[0].toTensor();
  const auto* storage = PagedStorage::of(parameter);
  if (storage == nullptr || storage->unit == nullptr) return;
  if (values.size() > 1 && values[1].isTensor() && PagedStorage::of(values[1].toTensor()) == storage) return;  // to(dtype) that it has
  for (const auto& known : storage->unit->parameters) {
    if (known.tensor.lock() != parameter.getIntrusivePtr()) continue;
    throw Error("parameter '" + known.name + "' of unit '" + storage->unit->name +
                "' is sharded and can't be given other memory (by torch::load, the module's to(dtype) or to(device), vector_to_parameters, "
                "set_data or set_); do that before fully_shard, or call fsdp::fully_unshard first; values may be loaded while "
                "SummonFullParams exposes the parameters, and fsdp::load reads checkpoints into shards");
  }
}

PagedStorage& storage_of(const engine::Unit& unit) { return *static_cast<PagedStorage*>(unit.whole.buffer.storage.unsafeGetStorageImpl()); }

/// A guard while an operator runs: the units that it has touched are present, and stay so.
class Running {
 public:
  Running() = default;
  ~Running() {
    for (auto* gate : gates_) gate->leave();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  /// Notifies each engine of its units: an operator may take parameters of several sharded models (a moving average of weights).
  void enter(const Touched& touched) {
    const auto pass = trigger::current_pass();
    c10::SmallVector<engine::Engine*, 2> engines;
    for (const auto& use : touched.uses) {
      if (std::find(engines.begin(), engines.end(), use.engine) == engines.end()) engines.push_back(use.engine);
    }
    if (engines.size() > 1) {
      // The order is fixed, because two threads that use the same two models could wait for each other otherwise. It is the same on all
      // ranks [Order is collective].
      std::sort(engines.begin(), engines.end(), [](const auto* a, const auto* b) { return a->options().model < b->options().model; });
    }
    for (auto* engine : engines) {
      c10::SmallVector<engine::Unit*, 4> units;
      for (const auto& use : touched.uses) {
        if (use.engine == engine) units.push_back(use.unit);
      }
      enter(*engine, {units.data(), units.size()}, pass);
    }
  }

 private:
  void enter(engine::Engine& engine, std::span<engine::Unit* const> units, engine::Pass pass) {
    auto& model = *storage_of(*units.front()).model;
    const bool within_backward = torch::autograd::get_current_graph_task_id() != -1;
    model.gate.enter();
    const bool in_use = engine.follows_current_stream() && engine.knows_grad_mode() &&
                        std::all_of(units.begin(), units.end(), [&](const auto* unit) { return unit->whole.in_use(pass); });
    // Units that forward was in when backward began count as in use until the engine knows of the backward.
    if (!in_use || (within_backward && !engine.in_backward())) {
      model.gate.leave();
      watch_backward(engine.shared_from_this());
      model.gate.enter_after([&] {
        if (!within_backward && !model.validated) {
          if (model.validate) model.validate();
          model.validated = true;
        }
        engine.enter(units, pass);
        for (const auto* unit : units) storage_of(*unit).watch_address();
      });
    }
    gates_.push_back(&model.gate);
  }

  c10::SmallVector<Gate*, 2> gates_;
};

/// Extends the error of an operator that has failed below the key. If the dtypes of its arguments may be the reason, the text says that
/// parameters have another dtype than the module was written with.
void explain(c10::Error& error, const Touched& touched) {
  if (error.msg().find("type") == std::string::npos) return;
  for (const auto& use : touched.uses) {
    const auto& policy = use.unit->options.mixed_precision;
    if (!policy || !policy->param_dtype) continue;
    error.add_context("fsdp: the operator takes parameters of unit '" + use.unit->name + "', which are computed with in " +
                      c10::toString(*policy->param_dtype) +
                      " (MixedPrecisionPolicy::param_dtype), and so must be its other arguments. Call the unit by fsdp::forward, which "
                      "converts its inputs (unless cast_forward_inputs is false), or convert them yourself");
    return;
  }
}

void trap(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = OperatorArguments::of(op);
  Touched touched;
  const auto values = torch::jit::last(*stack, arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto use = arguments.use(i, values);
    if (use == Use::kShape) {
      touched.deferred = touched.deferred || (values[i].isTensor() && deferred::DeferredStorage::of(values[i].toTensor()) != nullptr);
    } else {
      visit(values[i], use == Use::kWritten, touched);
    }
  }
  if (arguments.gives_memory()) refuse_other_memory(values);
  if (arguments.strides_storage()) {
    const auto* storage = PagedStorage::of(values[0].toTensor());
    if (storage != nullptr && storage->unit != nullptr) arguments.place_in_parameter(*storage->unit, &*(stack->end() - values.size()));
  }
  for (const auto& use : touched.uses) {
    if (use.written) use.unit->check_writable();
  }
  Running running;
  running.enter(touched);
  if (touched.deferred || c10::impl::tls_local_dispatch_key_set().included_.has(kTrapKey)) {
    deferred::record(op, stack);
  } else {
    // Autocast keeps copies of the weights that it casts until its outermost scope ends: for a sharded model, these would be all parameters
    // at once, and they could be older than an update.
    const NoAutocastCache no_cache(keys.has_any(c10::autocast_dispatch_keyset));
    const c10::impl::ExcludeDispatchKeyGuard below(kTrapKey);
    try {
      op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTrapKey), stack);
    } catch (c10::Error& error) {
      explain(error, touched);
      throw;
    }
  }
  for (const auto& use : touched.uses) {
    if (!use.written) continue;
    use.engine->main().wrote(*use.unit);
    storage_of(*use.unit).watch_address();
  }
}

}  // namespace

// `_` means every operator.
TORCH_LIBRARY_IMPL(_, DeferredInit, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&trap>()); }

}  // namespace fsdp::paging
