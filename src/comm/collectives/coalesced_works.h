#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace fsdp::comm {

/// The c10d works of one collective of ours. Operations posted between the constructor and end() are launched together where the backend
/// can (NCCL: one kernel for all of them). Without end(), after an exception, the destructor ends what has been posted: the backend must
/// not take the next collective's operations for more of this one's.
class CoalescedWorks {
 public:
  /// `several` operations are to come.
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

/// Each once. On CUDA the current stream waits, not the host.
void wait_all(const std::vector<c10::intrusive_ptr<c10d::Work>>& works);

}  // namespace fsdp::comm
