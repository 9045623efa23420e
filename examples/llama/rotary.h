#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "llama/rope.h"

namespace llama {

/// Cosines and sines, each [time, head_dim], in the dtype in which they are used.
struct Rotary {
  at::Tensor cos;
  at::Tensor sin;
};

/// Of the positions of x, [batch, time, width], the first of which is `first`, in a sequence of `length`, for heads of `head_dim` elements.
Rotary rotary_of(const Rope& rope, std::int64_t head_dim, const at::Tensor& x, std::int64_t first, std::int64_t length);

/// Turns the pairs (i, i + head_dim / 2) of x, [batch, heads, time, head_dim].
at::Tensor rotate(const at::Tensor& x, const Rotary& rotary);

}  // namespace llama
