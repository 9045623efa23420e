#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/collectives/native_communicator.h"
#include "comm/launch/world.h"
#include "comm/mesh/rendezvous.h"

namespace fsdp::testing {

/// A Gloo backend in the place of NCCL's, which counts what it sends.
class CountingBackend final : public c10d::Backend {
 public:
  explicit CountingBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), sent(static_cast<std::size_t>(gloo_->getSize())) {}

  const std::string getBackendName() const override { return "counting"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    sent[static_cast<std::size_t>(peer)] += static_cast<std::int64_t>(tensors[0].nbytes());
    return gloo_->send(tensors, peer, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return gloo_->recv(tensors, peer, tag);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    return gloo_->_reduce_scatter_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  const c10::intrusive_ptr<c10d::Backend> gloo_;

 public:
  std::vector<std::int64_t> sent;  ///< Bytes of messages, by peer.
};

inline comm::Row row_of(const comm::World& world) {
  comm::Row row{.dim = "dp_shard", .rank = world.rank, .global_ranks = {}, .world_size = world.size};
  for (int rank = 0; rank < world.size; ++rank) row.global_ranks.push_back(rank);
  return row;
}

struct CountingWorld {
  c10::intrusive_ptr<CountingBackend> backend;
  std::unique_ptr<comm::NativeCommunicator> communicator;
};

/// A communicator of all ranks, as a mesh makes it over NCCL. `ranks_per_host` is what the mesh would have found out.
inline CountingWorld counting_world(int ranks_per_host, std::int64_t piece_staging) {
  const comm::World world = comm::read_world(comm::process_environment);
  const comm::Row row = row_of(world);
  comm::Rendezvous rendezvous(world, "test", std::chrono::seconds(30));
  const auto backend = c10::make_intrusive<CountingBackend>(rendezvous.gloo_group(row, "data"));
  auto control = rendezvous.gloo_group(row, "control");
  auto communicator = std::make_unique<comm::NativeCommunicator>(row, backend, std::move(control), ranks_per_host,
                                                                 comm::Group::Ends::kElsewhere, piece_staging);
  communicator->barrier();
  return {.backend = backend, .communicator = std::move(communicator)};
}

/// Returns a communicator of all ranks over Gloo, which has the same native collectives as NCCL.
inline std::unique_ptr<comm::NativeCommunicator> native_world() {
  const comm::World world = comm::read_world(comm::process_environment);
  const comm::Row row = row_of(world);
  comm::Rendezvous rendezvous(world, "test", std::chrono::seconds(30));
  auto backend = rendezvous.gloo_group(row, "data");
  auto control = rendezvous.gloo_group(row, "control");
  auto communicator = std::make_unique<comm::NativeCommunicator>(row, std::move(backend), std::move(control));
  communicator->barrier();
  return communicator;
}

}  // namespace fsdp::testing
