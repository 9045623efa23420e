#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/mesh/device_mesh_state.h"
#include "engine/engine.h"
#include "fsdp/fsdp.h"

// Data that a machine corrupts, one bit at a time.
namespace fsdp::testing {

/// Flips one bit of a CPU tensor's memory; `at` modulo the number of its bits.
inline void flip_bit(const at::Tensor& tensor, std::uint64_t at) {
  const auto bits = static_cast<std::uint64_t>(tensor.nbytes()) * 8;
  if (bits == 0) return;
  auto* bytes = static_cast<std::uint8_t*>(const_cast<void*>(tensor.const_data_ptr()));
  bytes[at % bits / 8] ^= static_cast<std::uint8_t>(1U << (at % 8));
}

/// Which message of which unit arrives with a bit flipped, once.
struct DamagedMessage {
  std::string operation;  ///< "all-gather" or "reduce-scatter"; empty: none.
  std::string unit;
  std::uint64_t bit = 0;
};

/// Passes everything on to another communicator, and damages one message that this rank receives.
class DamagingCommunicator final : public comm::Communicator {
 public:
  DamagingCommunicator(std::shared_ptr<comm::Communicator> inner, std::shared_ptr<DamagedMessage> damaged)
      : inner_(std::move(inner)), damaged_(std::move(damaged)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::int64_t staging_numel(std::int64_t shard_numel) const override { return inner_->staging_numel(shard_numel); }
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType dtype) const override {
    return inner_->staging_numel(shard_numel, dtype);
  }

  std::unique_ptr<comm::Pending> all_gather(std::span<const comm::GatherPart> parts, const comm::Label& label) override {
    at::Tensor target;
    if (is_meant(label)) {
      // What another rank has sent.
      const auto& full = parts.front().full;
      const auto shard = full.numel() / size();
      target = full.narrow(0, (rank() + 1) % size() * shard, shard);
    }
    return damage(inner_->all_gather(parts, label), target);
  }
  std::unique_ptr<comm::Pending> reduce_scatter(std::span<const comm::ReducePart> parts, double scale, const comm::Label& label) override {
    const auto target = is_meant(label) ? parts.front().out : at::Tensor();
    return damage(inner_->reduce_scatter(parts, scale, label), target);
  }
  std::unique_ptr<comm::Pending> gather_uneven(std::span<const comm::UnevenPart> parts, const std::vector<bool>& receives,
                                               const comm::Label& label) override {
    return inner_->gather_uneven(parts, receives, label);
  }
  std::unique_ptr<comm::Pending> scatter(std::span<const comm::ScatterPart> parts, int root, const comm::Label& label) override {
    return inner_->scatter(parts, root, label);
  }
  at::Tensor exchange(const at::Tensor& value, const comm::Label& label) override { return inner_->exchange(value, label); }
  std::string broadcast(const std::string& text, int root, const comm::Label& label) override {
    return inner_->broadcast(text, root, label);
  }
  std::string gather(const std::string& text, const comm::Label& label) override { return inner_->gather(text, label); }
  void expect_equal(const std::string& text, const comm::Label& label) override { inner_->expect_equal(text, label); }
  void barrier() override { inner_->barrier(); }
  void confirm() override { inner_->confirm(); }

 private:
  class Damaged final : public comm::Pending {
   public:
    Damaged(std::unique_ptr<comm::Pending> inner, at::Tensor target, std::uint64_t bit)
        : inner_(std::move(inner)), target_(std::move(target)), bit_(bit) {}
    void wait() override {
      inner_->wait();
      if (target_.defined()) flip_bit(std::exchange(target_, {}), bit_);
    }

   private:
    std::unique_ptr<comm::Pending> inner_;
    at::Tensor target_;
    std::uint64_t bit_;
  };

  bool is_meant(const comm::Label& label) const {
    return !damaged_->operation.empty() && damaged_->operation == label.operation && damaged_->unit == label.unit;
  }
  std::unique_ptr<comm::Pending> damage(std::unique_ptr<comm::Pending> pending, const at::Tensor& target) {
    if (!target.defined() || target.numel() == 0) return pending;
    damaged_->operation.clear();
    return std::make_unique<Damaged>(std::move(pending), target, damaged_->bit);
  }

  std::shared_ptr<comm::Communicator> inner_;
  std::shared_ptr<DamagedMessage> damaged_;
};

/// The 1-D mesh `mesh` with a communicator that damages messages.
inline DeviceMesh damaging(const DeviceMesh& mesh, std::shared_ptr<DamagedMessage> damaged) {
  const auto& dim = mesh.dims().front().name;
  const auto communicator = std::make_shared<DamagingCommunicator>(mesh.communicator(dim), std::move(damaged));
  return DeviceMesh(std::make_shared<DeviceMesh::State>(
      DeviceMesh::State{.device = mesh.device(),
                        .rank = mesh.rank(),
                        .dims = mesh.dims(),
                        .coordinates = {mesh.coordinate(dim)},
                        .rows = {std::make_shared<MeshRow>(MeshRow{.communicator = communicator, .make = {}})}}));
}

}  // namespace fsdp::testing
