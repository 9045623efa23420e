#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>
#include <vector>

// Access from C++ to the tensors of a torch.optim.Optimizer: this rank's parts of parameters, gradients and state.
namespace fsdp::torch_python {

/// The tensors of the parameters of one group that have a gradient, in the order of the parameters.
struct OptimizedGroup {
  std::vector<std::size_t> indices;  ///< The parameters' indices in the group.
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> gradients;
  std::vector<std::vector<at::Tensor>> states;  ///< [key][entry]
  /// Parameters that Python has to prepare first, because they lack state that the keys name, or because their gradient has another layout
  /// than the parameter or is not complete yet. They are not among the others.
  std::vector<std::size_t> to_prepare;
};

/// `group` is one of the optimizer's param_groups, and `number` is its index. Messages begin with `optimizer`. `state` is the state of the
/// optimizer. Throws Error for gradients that are sparse or have another shape, and for tensors of other classes than torch's own and
/// DTensor. Needs the GIL.
OptimizedGroup optimized(const std::string& optimizer, const pybind11::dict& group, std::size_t number, const pybind11::dict& state,
                         const std::vector<std::string>& keys);

/// Returns this rank's part of a DTensor, and any other tensor itself.
at::Tensor local_of(const pybind11::handle& tensor);

}  // namespace fsdp::torch_python
