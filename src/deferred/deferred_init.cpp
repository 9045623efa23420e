#include "fsdp/deferred_init.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <unordered_set>
#include <utility>

#include "base/trap_key.h"
#include "deferred/deferred_init.h"
#include "deferred/deferred_record.h"
#include "deferred/deferred_storage.h"
#include "deferred/deferred_tape.h"
#include "fsdp/error.h"

namespace fsdp {
namespace deferred {

void for_each_value(std::span<const at::Tensor> tensors, const std::function<void(std::size_t index, const at::Tensor& value)>& take) {
  std::vector<DeferredView> wanted;
  std::vector<std::size_t> wanted_by;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto* storage = DeferredStorage::of(tensors[i]);
    if (storage == nullptr) {
      take(i, tensors[i].detach());
    } else if (storage->memory()) {
      take(i, Geometry::of(tensors[i]).view(storage->memory()));
    } else {
      wanted.push_back({.contents = storage->contents(), .geometry = Geometry::of(tensors[i])});
      wanted_by.push_back(i);
    }
  }
  replay(wanted, [&](std::size_t index, const at::Tensor& value) { take(wanted_by[index], value); });
}

void give_values(const std::vector<at::Tensor>& tensors, c10::Device device) {
  std::vector<at::Tensor> deferred;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& tensor : tensors) {
    if (DeferredStorage::of(tensor) != nullptr && seen.insert(tensor.unsafeGetTensorImpl()).second) deferred.push_back(tensor);
  }
  for_each_value(deferred, [&](std::size_t index, const at::Tensor& value) {
    const at::NoGradGuard no_grad;
    const auto& tensor = deferred[index];
    auto* storage = DeferredStorage::of(tensor);
    storage->session()->home = device;
    if (device.is_cpu()) storage->set_memory(value.storage());  // other views of the storage stay views of it
    become(tensor, value.to(device));
  });
}

void give_zeros(const std::vector<at::Tensor>& tensors, c10::Device device) {
  for (const auto& tensor : tensors) {
    auto* storage = DeferredStorage::of(tensor);
    if (storage == nullptr) continue;
    storage->session()->home = device;
    if (!storage->memory()) {
      const auto bytes = at::TensorOptions().dtype(at::kByte).device(device);
      storage->set_memory(at::zeros({static_cast<std::int64_t>(storage->nbytes())}, bytes).storage());
    }
    become(tensor, Geometry::of(tensor).view(storage->memory()));
  }
}

}  // namespace deferred

struct detail::Recording::State {
  explicit State(std::shared_ptr<deferred::DeferredSession> outer) : outer(std::move(outer)) {}

  std::shared_ptr<deferred::DeferredSession> outer;
  c10::impl::IncludeDispatchKeyGuard included{kTrapKey};
};

detail::Recording::Recording(DeferredInitOptions options) {
  if (at::autocast::is_autocast_enabled(at::kCPU)) {
    throw Error("deferred_init does not record what autocast would cast; turn autocast off while the model is built");
  }
  state_ = std::make_unique<State>(std::exchange(deferred::current_session(), std::make_shared<deferred::DeferredSession>()));
  deferred::current_session()->draw = options.draw;
}

detail::Recording::~Recording() { deferred::current_session() = std::move(state_->outer); }

void materialize(torch::nn::Module& module, c10::Device device) {
  if (deferred::current_session()) throw Error("materialize inside of deferred_init; call it on the result");
  auto tensors = module.parameters();
  for (const auto& buffer : module.buffers()) tensors.push_back(buffer);
  deferred::give_values(tensors, device);
}

bool is_deferred(const at::Tensor& tensor) { return deferred::DeferredStorage::of(tensor) != nullptr; }

}  // namespace fsdp
