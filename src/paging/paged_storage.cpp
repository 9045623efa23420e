#include "paging/paged_storage.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "base/trap_key.h"
#include "deferred/deferred_storage.h"
#include "fsdp/error.h"
#include "paging/backward.h"
#include "paging/warnings.h"
#include "trigger/gradient_hook.h"

namespace fsdp::paging {
namespace {

/// Passes a parameter's accumulated gradient to the engine. It owns the engine, which is therefore destroyed with its model.
struct DeliverToEngine {
  std::shared_ptr<engine::Engine> engine;
  engine::Unit& unit;
  std::size_t index;

  void operator()(at::Tensor gradient) const {
    const auto& info = unit.parameters[index];
    if (!info.trainable) {
      throw Error("parameter '" + info.name + "' of unit '" + unit.name +
                  "' got a gradient, but did not require one when fully_shard was called; set requires_grad before sharding");
    }
    watch_backward(engine);
    // If the gradient is a parameter, or a view of one, it is copied now, which gathers it, and not under the engine's lock.
    if (gradient.key_set().has(kTrapKey)) gradient = gradient.clone();
    engine->gradient(unit, index, gradient);
  }
};

/// Autograd's data about a paged parameter. It notices when code asks for the gradient outside of a backward, as torch's optimizers do.
class PagedMeta final : public torch::autograd::AutogradMeta {
 public:
  /// Takes all data from `before`, which is about to be destroyed.
  PagedMeta(AutogradMeta& before, const std::shared_ptr<engine::Engine>& engine, const engine::UnitParameter& parameter)
      : engine_(engine), parameter_(parameter) {
    name_ = std::move(before.name_);
    grad_ = std::move(before.grad_);
    grad_accumulator_ = std::move(before.grad_accumulator_);
    fw_grad_ = std::move(before.fw_grad_);
    hooks_ = std::move(before.hooks_);
    cpp_hooks_list_ = std::move(before.cpp_hooks_list_);
    requires_grad_ = before.requires_grad_;
    output_nr_ = before.output_nr_;
    [](auto& self, auto& other) {  // not in all versions of torch
      if constexpr (requires { self.grad_dtype_; }) self.grad_dtype_ = other.grad_dtype_;
      if constexpr (requires { self.allow_grad_dtype_mismatch_; }) self.allow_grad_dtype_mismatch_ = other.allow_grad_dtype_mismatch_;
    }(static_cast<AutogradMeta&>(*this), before);
  }

  at::Tensor& mutable_grad() override {
    notice();
    return grad_;
  }
  const at::Tensor& grad() const override {
    notice();
    return grad_;
  }
  /// The parameter is ordinary again.
  void forget() { engine_.reset(); }

 private:
  void notice() const {
    if (torch::autograd::get_current_graph_task_id() != -1) return;  // autograd itself
    const auto engine = engine_.lock();
    if (engine && parameter_.has_gradient) warn_of_grad(*engine, parameter_);
  }

  std::weak_ptr<engine::Engine> engine_;
  const engine::UnitParameter& parameter_;  // the engine's
};

void notice_grad(const at::Tensor& parameter, const std::shared_ptr<engine::Engine>& engine, const engine::UnitParameter& info) {
  auto* before = torch::autograd::impl::get_autograd_meta(parameter);
  if (before == nullptr || before->is_view_) return;  // it needs no gradient, or has a type of its own
  parameter.unsafeGetTensorImpl()->set_autograd_meta(std::make_unique<PagedMeta>(*before, engine, info));
}

/// Called when code asks for an address within the storage to write to.
void asked_for_address(c10::StorageImpl* storage) {
  if (c10::impl::tls_is_dispatch_key_excluded(kTrapKey)) return;  // it is an operator, which the trap has seen
  auto* paged = static_cast<PagedStorage*>(storage);
  if (paged->unit == nullptr || paged->unit->state() != engine::ParameterState::kPresent)
    return;  // it is the engine, which gathers the unit
  paged->unit->check_writable();
  paged->engine->main().wrote(*paged->unit);
}

}  // namespace

PagedStorage::PagedStorage(c10::Device device)
    : StorageImpl(use_byte_size_t(), c10::SymInt(0), c10::DataPtr(nullptr, device), c10::GetAllocator(device.type()),
                  /*resizable=*/false) {}

void PagedStorage::watch_address() {
  // The write goes directly to the replicated main parameters, where the engine writes, too.
  if (unit->replicated_parameters() && !unit->has_separate_main()) return;
  [](auto& storage) {
    if constexpr (requires { storage.set_materializer(&asked_for_address); }) {
      if (!storage.has_materializer()) storage.set_materializer(&asked_for_address);
    }
  }(static_cast<c10::StorageImpl&>(*this));
}

PagedModel& PagedModel::of(const engine::Engine& engine) {
  return *static_cast<PagedStorage*>(engine.units().front()->whole.buffer.storage.unsafeGetStorageImpl())->model;
}

namespace {

/// A parameter's place in its unit's storage, with the paged key.
c10::intrusive_ptr<c10::TensorImpl> paged_impl(const engine::Unit& unit, std::size_t index) {
  const auto& position = unit.layout.positions()[index];
  const auto& part = unit.whole.buffer.parts[position.sub_buffer];
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(unit.whole.buffer.storage), part.key_set() | c10::DispatchKeySet(kTrapKey),
                                                   part.dtype());
  impl->set_sizes_contiguous(unit.parameters[index].shape);
  impl->set_storage_offset(part.storage_offset() + position.offset);
  return impl;
}

}  // namespace

// set_data compares its arguments by an operator: with the key excluded it does not count as a use of the unit.

void page(const at::Tensor& parameter, const std::shared_ptr<engine::Engine>& engine, engine::Unit& unit, std::size_t index) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard untrapped(kTrapKey);
  at::Tensor handle = parameter;
  if (const auto* deferred = deferred::DeferredStorage::of(handle)) {
    deferred->session()->home = unit.whole.buffer.storage.device();
    deferred::become(handle, at::Tensor(paged_impl(unit, index)));
  } else {
    handle.set_data(at::Tensor(paged_impl(unit, index)));
  }
  notice_grad(handle, engine, unit.parameters[index]);
  torch::autograd::impl::set_post_acc_grad_hooks(
      handle, std::make_unique<trigger::GradientHook<DeliverToEngine>>(DeliverToEngine{engine, unit, index}));
}

// Not set_data, which would make the parameter forget what accumulates its gradient: a graph from before still refers to that.

void show(const at::Tensor& parameter, const at::Tensor& value) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
}

void hide(const at::Tensor& parameter, const engine::Unit& unit, std::size_t index) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(paged_impl(unit, index));
}

void unpage(const at::Tensor& parameter, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard untrapped(kTrapKey);
  at::Tensor handle = parameter;
  torch::autograd::impl::set_post_acc_grad_hooks(handle, nullptr);
  if (auto* meta = dynamic_cast<PagedMeta*>(torch::autograd::impl::get_autograd_meta(handle))) meta->forget();
  handle.set_data(value);
}

}  // namespace fsdp::paging
