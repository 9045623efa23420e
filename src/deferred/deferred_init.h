#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace fsdp::deferred {

/// Hands the value of each tensor to `take`: at once if it has memory, else computed. Not in their order: those that share operators are
/// computed together.
void for_each_value(std::span<const at::Tensor> tensors, const std::function<void(std::size_t index, const at::Tensor& value)>& take);

/// Gives those of the tensors that have none their values and memory on `device`, in place. From now on, what else their model keeps gets
/// its own when an operator takes it.
void give_values(const std::vector<at::Tensor>& tensors, c10::Device device);

/// Gives those of the tensors that have none memory on `device`, in place, set to zero.
void give_zeros(const std::vector<at::Tensor>& tensors, c10::Device device);

}  // namespace fsdp::deferred
