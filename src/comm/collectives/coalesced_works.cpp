#include "comm/collectives/coalesced_works.h"

#include <utility>

namespace fsdp::comm {

CoalescedWorks::CoalescedWorks(c10d::Backend& backend, bool several)
    : backend_(backend), together_(several && backend.supportsCoalescing()) {
  if (together_) backend_.startCoalescing();
}

CoalescedWorks::~CoalescedWorks() {
  if (!together_ || ended_) return;
  try {
    backend_.endCoalescing();
  } catch (...) {  // The first exception says more.
  }
}

void CoalescedWorks::add(c10::intrusive_ptr<c10d::Work> work) {
  if (!together_) works_.push_back(std::move(work));
}

std::vector<c10::intrusive_ptr<c10d::Work>> CoalescedWorks::end() {
  ended_ = true;
  if (together_) {
    if (auto work = backend_.endCoalescing()) works_.push_back(std::move(work));
  }
  return std::move(works_);
}

void wait_all(const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  for (const auto& work : works) work->wait();
}

}  // namespace fsdp::comm
