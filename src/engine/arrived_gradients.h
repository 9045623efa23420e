#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "engine/buffer.h"
#include "layout/unit_layout.h"

namespace fsdp::engine {

/// Keeps small gradients on a GPU on their way from autograd to the buffer in which their unit's gradients are collected. A gradient that
/// is a complete sub-buffer, and to which nothing else refers, is not copied there, but lent to the reduction. One kernel copies the
/// others.
class ArrivedGradients {
 public:
  /// Takes a gradient whose place in the buffer is `view`.
  void add(std::size_t parameter, const at::Tensor& view, const at::Tensor& gradient) { waiting_.push_back({parameter, view, gradient}); }
  /// Copies all gradients that wait into the buffer.
  void copy();
  /// Lends the gradients that can replace a part of the buffer, and copies the others. Returns true if the buffer then holds nothing.
  bool settle(const layout::UnitLayout& layout, const Buffer& buffer, bool may_lend);
  /// Returns the gradient that is lent for sub-buffer k; undefined if there is none.
  at::Tensor lent(std::size_t k) const { return k < lent_.size() ? lent_[k] : at::Tensor(); }
  void clear();

 private:
  struct Waiting {
    std::size_t parameter;
    at::Tensor view;
    at::Tensor gradient;
  };
  std::vector<Waiting> waiting_;
  std::vector<at::Tensor> lent_;  ///< Flat gradients by sub-buffer.
};

}  // namespace fsdp::engine
