#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace fsdp::deferred {

/// Computes the value of each tensor that has no memory, and passes the values of all tensors to `take`. Not in the order of `tensors`:
/// tensors that share operators are computed together.
void for_each_value(std::span<const at::Tensor> tensors, const std::function<void(std::size_t index, const at::Tensor& value)>& take);

/// Allocates the tensors without memory on `device`, and computes their values, in place. Other tensors that the model keeps get theirs
/// later, when an operator takes them.
void give_values(const std::vector<at::Tensor>& tensors, c10::Device device);

/// Allocates the tensors without memory on `device`, set to zero, in place.
void give_zeros(const std::vector<at::Tensor>& tensors, c10::Device device);

}  // namespace fsdp::deferred
