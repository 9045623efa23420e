#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/launch/world.h"
#include "comm/mesh/rendezvous.h"
#include "export/transfer_peers.h"
#include "fsdp/error.h"
#include "fsdp/transfer_plan.h"

namespace fsdp {
namespace weights {
namespace {

constexpr int kTag = 0;  // The backend has no other messages.

void wait_for(c10d::Work& work, std::chrono::milliseconds timeout) {
  if (!work.wait(timeout)) throw std::runtime_error("it was aborted");
}

/// The ranks of a c10d backend; null for a group of one rank.
class BackendPeers final : public TransferPeers {
 public:
  BackendPeers(c10::intrusive_ptr<c10d::Backend> backend, const c10::intrusive_ptr<c10d::Store>& store, c10::Device device)
      : TransferPeers(
            std::make_shared<Meetings>(store, backend == nullptr ? 0 : backend->getRank(), backend == nullptr ? 1 : backend->getSize())),
        backend_(std::move(backend)),
        device_(device) {}

  c10::Device device() const override { return device_; }

  std::vector<std::string> exchange(const std::string& bytes) const override {
    if (backend_ == nullptr) return {bytes};
    const auto size = static_cast<std::int64_t>(bytes.size());
    std::vector<std::int64_t> sizes;
    for (const auto& of_rank : gather(at::full({1}, size, at::kLong))) sizes.push_back(of_rank.item<std::int64_t>());
    const auto mine = at::zeros({*std::ranges::max_element(sizes)}, at::kByte);
    std::memcpy(mine.mutable_data_ptr(), bytes.data(), bytes.size());
    std::vector<std::string> all;
    for (const auto& of_rank : gather(mine)) {
      all.emplace_back(static_cast<const char*>(of_rank.const_data_ptr()), static_cast<std::size_t>(sizes[all.size()]));
    }
    return all;
  }

  std::vector<Wait> post(const std::vector<PostedMessage>& messages) const override {
    const bool coalesces = backend_->supportsCoalescing();
    if (coalesces) backend_->startCoalescing();
    std::vector<Wait> waits;
    for (const auto& message : messages) {
      std::vector<at::Tensor> argument = {message.bytes};
      const auto work = message.sends ? backend_->send(argument, message.peer, kTag) : backend_->recv(argument, message.peer, kTag);
      waits.emplace_back([work](std::chrono::milliseconds timeout) { wait_for(*work, timeout); });
    }
    if (!coalesces) return waits;
    return {[work = backend_->endCoalescing()](std::chrono::milliseconds timeout) { wait_for(*work, timeout); }};
  }

 private:
  /// The tensors of all ranks, equal in size, in host memory.
  std::vector<at::Tensor> gather(const at::Tensor& mine) const {
    std::vector<at::Tensor> input = {mine.to(device_)};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int rank = 0; rank < size(); ++rank) outputs.front().push_back(at::empty_like(input.front()));
    backend_->allgather(outputs, input)->wait();
    for (auto& output : outputs.front()) output = output.cpu();
    return outputs.front();
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const c10::Device device_;
};

std::shared_ptr<TransferPeers> connect(const DeviceMesh& mesh) {
  static std::atomic<int> count{0};  // All ranks make their groups in the same order.
  constexpr std::chrono::minutes kTimeout(10);
  const auto world = comm::read_world(comm::process_environment);
  if (mesh.size() != world.size) {
    throw Error("a TransferGroup takes a mesh of all " + std::to_string(world.size) + " ranks that were launched, got one of " +
                std::to_string(mesh.size()));
  }
  comm::Row row{.dim = "transfer", .rank = world.rank, .global_ranks = {}, .world_size = world.size};
  for (int rank = 0; rank < world.size; ++rank) row.global_ranks.push_back(rank);
  comm::Rendezvous rendezvous(world, "transfer" + std::to_string(count++), kTimeout);
  auto backend = mesh.device().is_cpu() ? rendezvous.gloo_group(row, "gloo") : rendezvous.device_group(row, "device", mesh.device());
  auto peers = std::make_shared<BackendPeers>(std::move(backend), rendezvous.store("meetings"), mesh.device());
  peers->meetings().meet({}, kTimeout);  // The last rank has read the store now, so that rank 0, which serves it, may leave.
  return peers;
}

}  // namespace
}  // namespace weights

TransferGroup::TransferGroup(const DeviceMesh& mesh) : peers_(weights::connect(mesh)) {}

TransferGroup::TransferGroup(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store,
                             c10::Device device) {
  if (backend == nullptr || store == nullptr) throw Error("a TransferGroup takes a backend and a store of its ranks, got null");
  peers_ = std::make_shared<weights::BackendPeers>(backend, store, device);
}

int TransferGroup::rank() const { return peers_->rank(); }

int TransferGroup::size() const { return peers_->size(); }

}  // namespace fsdp
