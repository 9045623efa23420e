#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/mesh/device_mesh_state.h"
#include "fsdp/device_mesh.h"
#include "memory/device_memory.h"

namespace fsdp::testing {

using Log = std::vector<std::string>;

/// Passes everything on to another communicator, and writes down what is started ("gather blocks.1") and what is waited for ("wait gather
/// blocks.1").
class RecordingCommunicator final : public comm::Communicator {
 public:
  RecordingCommunicator(std::shared_ptr<comm::Communicator> inner, std::shared_ptr<Log> log)
      : inner_(std::move(inner)), log_(std::move(log)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::int64_t staging_numel(std::int64_t shard_numel) const override { return inner_->staging_numel(shard_numel); }

  std::unique_ptr<comm::Pending> all_gather(std::span<const comm::GatherPart> parts, const comm::Label& label) override {
    const std::string what = (label.operation == std::string("all-gather") ? "gather " : "gather gradients ") + std::string(label.unit);
    log_->push_back(what);
    return std::make_unique<Recorded>(inner_->all_gather(parts, label), "wait " + what, log_);
  }

  std::unique_ptr<comm::Pending> reduce_scatter(std::span<const comm::ReducePart> parts, double scale, const comm::Label& label) override {
    const std::string what = "reduce " + std::string(label.unit);
    log_->push_back(what);
    return std::make_unique<Recorded>(inner_->reduce_scatter(parts, scale, label), "wait " + what, log_);
  }

  std::unique_ptr<comm::Pending> gather_uneven(std::span<const comm::UnevenPart> parts, const std::vector<bool>& receives,
                                               const comm::Label& label) override {
    const std::string what = "gather " + std::string(label.unit);
    log_->push_back(what);
    return std::make_unique<Recorded>(inner_->gather_uneven(parts, receives, label), "wait " + what, log_);
  }

  std::unique_ptr<comm::Pending> scatter(std::span<const comm::ScatterPart> parts, int root, const comm::Label& label) override {
    const std::string what = "scatter " + std::string(label.unit);
    log_->push_back(what);
    return std::make_unique<Recorded>(inner_->scatter(parts, root, label), "wait " + what, log_);
  }

  at::Tensor exchange(const at::Tensor& value, const comm::Label& label) override {
    log_->push_back("exchange");
    return inner_->exchange(value, label);
  }
  std::string broadcast(const std::string& text, int root, const comm::Label& label) override {
    log_->push_back("broadcast");
    return inner_->broadcast(text, root, label);
  }
  std::string gather(const std::string& text, const comm::Label& label) override {
    log_->push_back("gather");
    return inner_->gather(text, label);
  }
  void expect_equal(const std::string& text, const comm::Label& label) override { inner_->expect_equal(text, label); }
  void barrier() override { inner_->barrier(); }

  /// A backend with an allocator: "allocate".
  comm::MemorySource use_memory(c10::Device device, comm::BufferMemory memory) override {
    if (memory != comm::BufferMemory::kGroup) return {};
    return [log = log_, device](std::int64_t bytes) {
      log->push_back("allocate");
      return memory::allocate(device, bytes);
    };
  }

 private:
  class Recorded final : public comm::Pending {
   public:
    Recorded(std::unique_ptr<comm::Pending> inner, std::string event, std::shared_ptr<Log> log)
        : inner_(std::move(inner)), event_(std::move(event)), log_(std::move(log)) {}
    ~Recorded() override {
      if (!waited_) log_->push_back("drop " + event_.substr(5));
    }
    void wait() override {
      if (!std::exchange(waited_, true)) log_->push_back(event_);
      inner_->wait();
    }

   private:
    std::unique_ptr<comm::Pending> inner_;
    std::string event_;
    std::shared_ptr<Log> log_;
    bool waited_ = false;
  };

  std::shared_ptr<comm::Communicator> inner_;
  std::shared_ptr<Log> log_;
};

/// The 1-D mesh `mesh` with its communicator recorded into `log`.
inline DeviceMesh recorded(const DeviceMesh& mesh, std::shared_ptr<Log> log) {
  const auto communicator = std::make_shared<RecordingCommunicator>(mesh.communicator(mesh.dims().front().name), std::move(log));
  return DeviceMesh(std::make_shared<DeviceMesh::State>(
      DeviceMesh::State{.device = mesh.device(),
                        .rank = mesh.rank(),
                        .dims = mesh.dims(),
                        .coordinates = {mesh.coordinate(mesh.dims().front().name)},
                        .rows = {std::make_shared<MeshRow>(MeshRow{.communicator = communicator, .make = {}})}}));
}

}  // namespace fsdp::testing
