#include "torch_python/visible_communicator.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>

namespace fsdp::torch_python {
namespace {

std::atomic<bool> replaced = false;  // any thread may read it

comm::CommStats sum(const comm::CommStats& a, const comm::CommStats& b) {
  return {.all_gather_bytes = a.all_gather_bytes + b.all_gather_bytes,
          .reduce_scatter_bytes = a.reduce_scatter_bytes + b.reduce_scatter_bytes,
          .scatter_bytes = a.scatter_bytes + b.scatter_bytes,
          .control_bytes = a.control_bytes + b.control_bytes,
          .control_messages = a.control_messages + b.control_messages,
          .shared_memory_bytes = a.shared_memory_bytes + b.shared_memory_bytes,
          .all_gathers = a.all_gathers + b.all_gathers,
          .reduce_scatters = a.reduce_scatters + b.reduce_scatters,
          .scatters = a.scatters + b.scatters};
}

}  // namespace

bool collectives_are_visible() { return replaced || c10::impl::TorchDispatchModeTLS::stack_len() > 0; }

void set_collectives_replaced(bool are_replaced) { replaced = are_replaced; }

template <typename Call>
auto VisibleCommunicator::counted(const Call& call) {
  auto result = call(collectives_are_visible() ? *python_ : *own_);
  stats_ = sum(own_->stats(), python_->stats());
  return result;
}

std::unique_ptr<comm::Pending> VisibleCommunicator::all_gather(std::span<const comm::GatherPart> parts, const comm::Label& label) {
  return counted([&](comm::Communicator& by) { return by.all_gather(parts, label); });
}

std::unique_ptr<comm::Pending> VisibleCommunicator::reduce_scatter(std::span<const comm::ReducePart> parts, double scale,
                                                                   const comm::Label& label) {
  return counted([&](comm::Communicator& by) { return by.reduce_scatter(parts, scale, label); });
}

std::unique_ptr<comm::Pending> VisibleCommunicator::gather_uneven(std::span<const comm::UnevenPart> parts,
                                                                  const std::vector<bool>& receives, const comm::Label& label) {
  return counted([&](comm::Communicator& by) { return by.gather_uneven(parts, receives, label); });
}

std::unique_ptr<comm::Pending> VisibleCommunicator::scatter(std::span<const comm::ScatterPart> parts, int root, const comm::Label& label) {
  return own_->scatter(parts, root, label);
}

at::Tensor VisibleCommunicator::exchange(const at::Tensor& value, const comm::Label& label) {
  auto all = own_->exchange(value, label);
  stats_ = sum(own_->stats(), python_->stats());
  return all;
}

std::string VisibleCommunicator::broadcast(const std::string& text, int root, const comm::Label& label) {
  return own_->broadcast(text, root, label);
}

std::string VisibleCommunicator::gather(const std::string& text, const comm::Label& label) { return own_->gather(text, label); }

void VisibleCommunicator::expect_equal(const std::string& text, const comm::Label& label) { own_->expect_equal(text, label); }

void VisibleCommunicator::barrier() { own_->barrier(); }

void VisibleCommunicator::confirm() { own_->confirm(); }

}  // namespace fsdp::torch_python
