#pragma once

#include <torch/extension.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace fsdp::torch_python {

/// Collectives over whatever torch.distributed can do: each one is a call of `collectives`, an object of Python
/// (libfsdp._collectives.Collectives), with one flat tensor in and one out. So process groups written in Python serve, and each unit's
/// gather and reduction is one collective that others can see, replace and count. Takes the GIL for the calls.
class PythonCommunicator final : public comm::Communicator, public std::enable_shared_from_this<PythonCommunicator> {
 public:
  PythonCommunicator(pybind11::object collectives, int rank, int size);
  ~PythonCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::int64_t staging_numel(std::int64_t) const override { return 0; }

  std::unique_ptr<comm::Pending> all_gather(std::span<const comm::GatherPart> parts, const comm::Label& label) override;
  std::unique_ptr<comm::Pending> reduce_scatter(std::span<const comm::ReducePart> parts, double scale, const comm::Label& label) override;
  std::unique_ptr<comm::Pending> scatter(std::span<const comm::ScatterPart> parts, int root, const comm::Label& label) override;
  at::Tensor exchange(const at::Tensor& value, const comm::Label& label) override;
  std::string broadcast(const std::string& text, int root, const comm::Label& label) override;
  std::string gather(const std::string& text, const comm::Label& label) override;
  void expect_equal(const std::string& text, const comm::Label& label) override;
  void barrier() override;
  comm::MemorySource use_memory(c10::Device device, comm::BufferMemory memory) override;

 private:
  /// In the backend's own memory.
  c10::DataPtr allocate(std::int64_t bytes) const;
  /// What a collective needs itself: 1-D, not initialised.
  at::Tensor empty(std::int64_t numel, const at::TensorOptions& options) const;
  /// at::cat, into such memory.
  at::Tensor joined(const std::vector<at::Tensor>& tensors, std::int64_t dim) const;
  std::vector<std::string> texts_of_all(const std::string& text, const comm::Label& label);

  pybind11::object collectives_;
  int rank_;
  int size_;
  bool uses_own_memory_ = false;
};

}  // namespace fsdp::torch_python
