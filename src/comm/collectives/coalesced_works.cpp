#include "comm/collectives/coalesced_works.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>
#include <utility>

namespace fsdp::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

/// TORCH_DISTRIBUTED_DEBUG=DETAIL puts a backend in between that compares calls; before torch 2.13, it has none for several tensors.
bool takes_several(const c10d::Backend& backend) {
  return backend.supportsCoalescing() && dynamic_cast<const c10d::ProcessGroupWrapper*>(&backend) == nullptr;
}

/// Calls `together` with the tensors of each dtype, or `each` for every pair, where there is one of its dtype or the backend does not
/// coalesce.
template <typename Together, typename Each>
Works by_dtype(const c10d::Backend& backend, Tensors outs, Tensors ins, const Together& together, const Each& each) {
  Works works;
  while (!ins.empty()) {
    const auto is_of_first = [dtype = ins.front().scalar_type()](const at::Tensor& tensor) { return tensor.scalar_type() == dtype; };
    Tensors other_outs, other_ins;  // Of other dtypes, which few units have.
    if (!std::ranges::all_of(ins, is_of_first)) {
      for (std::size_t k = 0; k < ins.size(); ++k) {
        if (is_of_first(ins[k])) continue;
        other_outs.push_back(outs[k]);
        other_ins.push_back(ins[k]);
      }
      std::erase_if(outs, std::not_fn(is_of_first));
      std::erase_if(ins, std::not_fn(is_of_first));
    }
    if (ins.size() > 1 && takes_several(backend)) {
      works.push_back(together(outs, ins));
    } else {
      for (std::size_t k = 0; k < ins.size(); ++k) works.push_back(each(outs[k], ins[k]));
    }
    outs = std::move(other_outs);
    ins = std::move(other_ins);
  }
  return works;
}

}  // namespace

bool is_like_nccl(const c10d::Backend& backend) { return backend.getBackendName().ends_with("ccl"); }

CoalescedWorks::CoalescedWorks(c10d::Backend& backend, bool several)
    : backend_(backend), together_(several && backend.supportsCoalescing()) {
  if (together_) backend_.startCoalescing();
}

CoalescedWorks::~CoalescedWorks() {
  if (!together_ || ended_) return;
  try {
    backend_.endCoalescing();
  } catch (...) {  // The first exception has more information.
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

Works all_gather_together(c10d::Backend& backend, Tensors wholes, Tensors shards) {
  return by_dtype(
      backend, std::move(wholes), std::move(shards),
      [&](Tensors& outs, Tensors& ins) { return backend.allgather_into_tensor_coalesced(outs, ins); },
      [&](at::Tensor& out, at::Tensor& in) { return backend._allgather_base(out, in); });
}

Works reduce_scatter_together(c10d::Backend& backend, Tensors outs, Tensors unreduced, const c10d::ReduceOp& op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  return by_dtype(
      backend, std::move(outs), std::move(unreduced),
      [&](Tensors& of_dtype, Tensors& ins) { return backend.reduce_scatter_tensor_coalesced(of_dtype, ins, options); },
      [&](at::Tensor& out, at::Tensor& in) { return backend._reduce_scatter_base(out, in, options); });
}

void wait_all(const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  for (const auto& work : works) work->wait();
}

}  // namespace fsdp::comm
