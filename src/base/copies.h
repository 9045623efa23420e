#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp {

/// Collects copies between tensors, and makes them together. On a GPU, one kernel copies all tensors of the same dtypes, whereas a copy_()
/// for each tensor would launch a kernel for each.
class Copies {
 public:
  /// When run() is called, `to` gets the values of `from`, which has the same sizes. The host does not wait for copies from pinned memory.
  void add(const at::Tensor& to, const at::Tensor& from);
  /// Makes all copies that were added, on the current stream, and forgets them.
  void run();
  void clear() { groups_.clear(); }

 private:
  struct Group {
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
  };
  std::vector<Group> groups_;
};

}  // namespace fsdp
