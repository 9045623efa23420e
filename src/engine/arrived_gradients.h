#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "engine/buffer.h"
#include "layout/unit_layout.h"

namespace fsdp::engine {

/// Small gradients on a GPU, between autograd and the buffer in which their unit's gradients are collected. What is the whole of a
/// sub-buffer as it is, and nobody else's, need not be copied there: it is lent to the reduction. The others are copied by one kernel.
class ArrivedGradients {
 public:
  /// For `view`, the parameter's place in the buffer.
  void add(std::size_t parameter, const at::Tensor& view, const at::Tensor& gradient) { waiting_.push_back({parameter, view, gradient}); }
  /// All into the buffer.
  void copy();
  /// Lends what may and can be lent in place of a part of the buffer, and copies the others. True if the buffer then holds nothing.
  bool settle(const layout::UnitLayout& layout, const Buffer& buffer, bool may_lend);
  /// What is lent for sub-buffer k; undefined if nothing is.
  at::Tensor lent(std::size_t k) const { return k < lent_.size() ? lent_[k] : at::Tensor(); }
  void clear();

 private:
  struct Waiting {
    std::size_t parameter;
    at::Tensor view;
    at::Tensor gradient;
  };
  std::vector<Waiting> waiting_;
  std::vector<at::Tensor> lent_;  ///< Flat, by sub-buffer.
};

}  // namespace fsdp::engine
