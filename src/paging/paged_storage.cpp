#include "paging/paged_storage.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <utility>

#include "base/trap_key.h"
#include "deferred/deferred_storage.h"
#include "fsdp/error.h"
#include "paging/backward.h"

namespace fsdp::paging {
namespace {

/// Hands a parameter's accumulated gradient to the engine. Owned by the parameter, and holds the engine: a model that dies takes its
/// engine along.
class GradientHook : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::shared_ptr<engine::Engine> engine, engine::Unit& unit, std::size_t index)
      : engine_(std::move(engine)), unit_(unit), index_(index) {}

  void operator()(const torch::autograd::Variable& parameter) override {
    // Taken first: a gradient that is refused must not stay, to be added to the next one.
    const auto gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
    const auto& info = unit_.parameters[index_];
    if (!info.trainable) {
      throw Error("parameter '" + info.name + "' of unit '" + unit_.name +
                  "' got a gradient, but did not require one when fully_shard was called; set requires_grad before sharding");
    }
    watch_backward(engine_);
    engine_->gradient(unit_, index_, gradient);
  }

 private:
  std::shared_ptr<engine::Engine> engine_;
  engine::Unit& unit_;
  std::size_t index_;
};

}  // namespace

PagedStorage::PagedStorage(c10::Device device)
    : StorageImpl(use_byte_size_t(), c10::SymInt(0), c10::DataPtr(nullptr, device), c10::GetAllocator(device.type()),
                  /*resizable=*/false) {}

namespace {

/// A parameter's place in its unit's storage, with the paged key.
c10::intrusive_ptr<c10::TensorImpl> paged_impl(const engine::Unit& unit, std::size_t index) {
  const auto& placement = unit.layout.placements()[index];
  const auto& part = unit.full.parts[placement.sub_buffer];
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(unit.full.storage), part.key_set() | c10::DispatchKeySet(kTrapKey), part.dtype());
  impl->set_sizes_contiguous(unit.parameters[index].shape);
  impl->set_storage_offset(part.storage_offset() + placement.offset);
  return impl;
}

}  // namespace

// set_data compares its arguments by an operator: with the key excluded it does not count as a use of the unit.

void page(const at::Tensor& parameter, const std::shared_ptr<engine::Engine>& engine, engine::Unit& unit, std::size_t index) {
  const torch::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard untrapped(kTrapKey);
  at::Tensor handle = parameter;
  if (const auto* deferred = deferred::DeferredStorage::of(handle)) {
    deferred->session()->home = unit.full.storage.device();
    deferred::become(handle, at::Tensor(paged_impl(unit, index)));
  } else {
    handle.set_data(at::Tensor(paged_impl(unit, index)));
  }
  torch::autograd::impl::set_post_acc_grad_hooks(handle, std::make_unique<GradientHook>(engine, unit, index));
}

// Not set_data, which would make the parameter forget what accumulates its gradient: a graph from before still refers to that.

void show(const at::Tensor& parameter, const at::Tensor& value) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
}

void hide(const at::Tensor& parameter, const engine::Unit& unit, std::size_t index) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(paged_impl(unit, index));
}

void unpage(const at::Tensor& parameter, const at::Tensor& value) {
  const torch::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard untrapped(kTrapKey);
  at::Tensor handle = parameter;
  torch::autograd::impl::set_post_acc_grad_hooks(handle, nullptr);
  handle.set_data(value);
}

}  // namespace fsdp::paging
