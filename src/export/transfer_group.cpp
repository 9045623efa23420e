#include <atomic>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/launch/world.h"
#include "comm/mesh/rendezvous.h"
#include "export/transfer_peers.h"
#include "fsdp/error.h"
#include "fsdp/transfer_plan.h"

namespace fsdp {
namespace {

/// `backend`: null for a group of one rank.
std::shared_ptr<weights::TransferPeers> peers_of(const c10::intrusive_ptr<c10d::Backend>& backend, c10::intrusive_ptr<c10d::Store> store,
                                                 c10::Device device) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  if (backend != nullptr) {
    group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
    group->setBackend(device.type(), c10d::ProcessGroup::BackendType::CUSTOM, backend);
  }
  return std::make_shared<weights::TransferPeers>(std::move(group), std::move(store), device);
}

std::shared_ptr<weights::TransferPeers> connect(const DeviceMesh& mesh) {
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
  const auto backend = mesh.device().is_cpu() ? rendezvous.gloo_group(row, "gloo") : rendezvous.device_group(row, "device", mesh.device());
  auto peers = peers_of(backend, rendezvous.store("rendezvous"), mesh.device());
  peers->rendezvous({}, kTimeout);  // The last rank has read the store now, so that rank 0, which serves it, may leave.
  return peers;
}

}  // namespace

TransferGroup::TransferGroup(const DeviceMesh& mesh) : peers_(connect(mesh)) {}

TransferGroup::TransferGroup(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store,
                             c10::Device device) {
  if (backend == nullptr || store == nullptr) throw Error("a TransferGroup takes a backend and a store of its ranks, got null");
  peers_ = peers_of(backend, store, device);
}

int TransferGroup::rank() const { return peers_->rank(); }

int TransferGroup::size() const { return peers_->size(); }

}  // namespace fsdp
