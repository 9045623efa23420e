#pragma once

#include <torch/extension.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace fsdp::torch_python {

/// Runs collectives by torch.distributed. Each one is a call of `collectives`, a libfsdp._comm.collectives.Collectives in Python, with one
/// flat input tensor and one flat output tensor. It therefore works with process groups that are written in Python, and each unit's gather
/// or reduction is one collective, which programs can observe, replace and count. It takes the GIL for the calls.
class PythonCommunicator final : public comm::Communicator, public std::enable_shared_from_this<PythonCommunicator> {
 public:
  PythonCommunicator(pybind11::object collectives, int rank, int size);
  ~PythonCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::int64_t staging_numel(std::int64_t) const override { return 0; }

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
  comm::MemorySource use_memory(c10::Device device, comm::BufferMemory memory) override;

 private:
  /// Allocates in the backend's own memory.
  c10::DataPtr allocate(std::int64_t bytes) const;
  /// Returns a 1-D tensor, not initialised, for a collective's own use.
  at::Tensor empty(std::int64_t numel, const at::TensorOptions& options) const;
  /// Does the same as at::cat, with the result in such memory.
  at::Tensor joined(const std::vector<at::Tensor>& tensors, std::int64_t dim) const;
  std::vector<std::string> texts_of_all(const std::string& text, const comm::Label& label);

  pybind11::object collectives_;
  int rank_;
  int size_;
  bool uses_own_memory_ = false;
};

}  // namespace fsdp::torch_python
