#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fsdp {

/// A guard. During its lifetime, transformations of torch.func (grad, jvp, vmap) do not apply to operators of this thread, because code
/// that moves parameters and gradients is not a part of the transformed function.
class OutsideTransforms {
 public:
  OutsideTransforms()
      : guard_(c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace fsdp
