#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp {

/// Copies of tensors that are made together: one kernel on a GPU for all that have the same dtypes, where one copy_() each would launch as
/// many as there are tensors.
class Copies {
 public:
  /// `to` gets the values of `from`, of its sizes, once run() is called. From pinned memory the host does not wait.
  void add(const at::Tensor& to, const at::Tensor& from);
  /// All that were added, on the current stream; then there are none.
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
