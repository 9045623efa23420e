#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fsdp {

/// While it lives, operators of this thread compute what they say, although a transformation of torch.func (grad, jvp, vmap) is under way:
/// what moves parameters and gradients is no part of the function that is transformed.
class OutsideTransforms {
 public:
  OutsideTransforms()
      : guard_(c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace fsdp
