#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace fsdp::comm {

/// NCCL and its like: a stream waits for their collectives, not the host; they divide as they add up, and have an all-to-all of lists.
bool is_like_nccl(const c10d::Backend& backend);

/// The c10d works of one collective of this library. Operations posted between the constructor and end() are launched together where the
/// backend can (NCCL: one kernel for all of them). If end() is not called because of an exception, the destructor ends the group of
/// operations, so that the backend does not add the operations of the next collective to it.
class CoalescedWorks {
 public:
  /// `several`: whether more than one operation will be posted.
  CoalescedWorks(c10d::Backend& backend, bool several);
  ~CoalescedWorks();
  CoalescedWorks(const CoalescedWorks&) = delete;
  CoalescedWorks& operator=(const CoalescedWorks&) = delete;

  void add(c10::intrusive_ptr<c10d::Work> work);
  std::vector<c10::intrusive_ptr<c10d::Work>> end();

 private:
  c10d::Backend& backend_;
  const bool together_;
  bool ended_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

/// Gathers each of `shards` into the tensor of `wholes` at its place. A backend that coalesces gets all tensors of a dtype in one call: for
/// NCCL, a call of its own for each parameter of a unit costs the host more than the rest of a gather.
std::vector<c10::intrusive_ptr<c10d::Work>> all_gather_together(c10d::Backend& backend, std::vector<at::Tensor> wholes,
                                                                std::vector<at::Tensor> shards);

/// Sums each of `unreduced` over the ranks into the tensor of `outs` at its place, in as few calls as all_gather_together.
std::vector<c10::intrusive_ptr<c10d::Work>> reduce_scatter_together(c10d::Backend& backend, std::vector<at::Tensor> outs,
                                                                    std::vector<at::Tensor> unreduced, const c10d::ReduceOp& op);

/// Waits for each of the works. On CUDA the current stream waits, not the host.
void wait_all(const std::vector<c10::intrusive_ptr<c10d::Work>>& works);

}  // namespace fsdp::comm
