#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>
#include <vector>

// What a torch.optim.Optimizer holds, seen from C++: this rank's part of parameters, gradients and state.
namespace fsdp::torch_python {

/// Of one group, in the order of its parameters: those that have a gradient.
struct OptimizedGroup {
  std::vector<std::size_t> indices;  ///< In the group.
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> gradients;
  std::vector<std::vector<at::Tensor>> states;  ///< [key][entry]
  /// Parameters that Python has to look at first: without the state that the keys name, or with a gradient that lies otherwise than the
  /// parameter or is still on its way. They are not among the others.
  std::vector<std::size_t> to_prepare;
};

/// `group`: of param_groups; `number`: its place there, for messages, which begin with `optimizer`. `state`: the optimizer's. Throws Error
/// for gradients that are sparse or have another shape, and for tensors of other classes than torch's own and DTensor. With the GIL.
OptimizedGroup optimized(const std::string& optimizer, const pybind11::dict& group, std::size_t number, const pybind11::dict& state,
                         const std::vector<std::string>& keys);

/// This rank's part of a DTensor; any other tensor itself.
at::Tensor local_of(const pybind11::handle& tensor);

}  // namespace fsdp::torch_python
