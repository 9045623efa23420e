#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace fsdp::torch_python {

/// Runs collectives over the engine's own connections, except while the program observes them: under a dispatch mode (CommDebugMode counts
/// collectives), or after it has replaced functions of torch.distributed. Then each of them is one call of torch.distributed, as in FSDP2.
/// Either all ranks must observe, or none. Small exchanges always use the engine's own connections.
class VisibleCommunicator final : public comm::Communicator {
 public:
  VisibleCommunicator(std::shared_ptr<comm::Communicator> own, std::shared_ptr<comm::Communicator> python)
      : own_(std::move(own)), python_(std::move(python)) {}

  int rank() const override { return own_->rank(); }
  int size() const override { return own_->size(); }
  bool is_alone() const override { return own_->is_alone(); }
  std::int64_t staging_numel(std::int64_t shard_numel) const override { return own_->staging_numel(shard_numel); }
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const override {
    return own_->staging_numel(shard_numel, wire_dtype);
  }
  comm::Traffic traffic() const override { return own_->traffic(); }

  std::unique_ptr<comm::Pending> all_gather(std::span<const comm::GatherPart> parts, const comm::Label& label) override;
  std::unique_ptr<comm::Pending> reduce_scatter(std::span<const comm::ReducePart> parts, double scale, const comm::Label& label) override;
  std::unique_ptr<comm::Pending> gather_uneven(std::span<const comm::UnevenPart> parts, const std::vector<bool>& receives,
                                               const comm::Label& label) override;
  std::unique_ptr<comm::Pending> scatter(std::span<const comm::ScatterPart> parts, int root, const comm::Label& label) override;
  at::Tensor exchange(const at::Tensor& value, const comm::Label& label) override;
  std::string broadcast(const std::string& text, int root, const comm::Label& label) override;
  std::string gather(const std::string& text, const comm::Label& label) override;
  void expect_equal(const std::string& text, const comm::Label& label) override;
  void barrier() override;
  void confirm() override;
  std::uint32_t events_source() const override { return own_->events_source(); }
  comm::MemorySource use_memory(c10::Device device, comm::BufferMemory memory) override { return own_->use_memory(device, memory); }

 private:
  template <typename Call>
  auto counted(const Call& call);

  std::shared_ptr<comm::Communicator> own_;
  std::shared_ptr<comm::Communicator> python_;
};

/// True if the program observes collectives on this thread.
bool collectives_are_visible();
/// Returns whether the program has replaced functions of torch.distributed.
void set_collectives_replaced(bool replaced);

}  // namespace fsdp::torch_python
