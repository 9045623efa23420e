#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "export/route.h"
#include "export/weight_entry.h"
#include "fsdp/device_mesh.h"

namespace fsdp::weights {

/// The factors of products that are added to tensors when these are packed: LoRA's adapters. Ranks have parts of the factors as of any
/// tensor. They are gathered whole, which costs little because they are thin, and each rank computes what belongs to its own part of the
/// tensor. Not thread-safe.
class Adapters {
 public:
  Adapters() = default;
  /// `mesh`: on its device, they are gathered, and products are computed. Collective over the ranks of the factors. Throws CommError.
  Adapters(std::vector<Entry> factors, const DeviceMesh& mesh);

  /// Takes memory for the factors of `entries`, and puts this rank's parts there. Returns the bytes that are in use until release(), those
  /// of merge() with them.
  std::int64_t hold(std::span<const Entry* const> entries);
  /// Brings the other ranks' parts of what is held. Collective over the ranks of the factors. Throws CommError.
  void gather(const comm::Label& label);
  /// Puts what has come in order, before it is used.
  void put_in_order();
  /// Writes this rank's part of an entry, with what is added to it, to `to`: 1-D, of the dtype that travels. Products and sums are computed
  /// in fp32 (fp64, if one of the tensors has it), and the sum is rounded once.
  void merge(const at::Tensor& to, const Entry& entry) const;
  /// Gives the memory back. Returns what hold() returned.
  std::int64_t release();

 private:
  at::Tensor whole(std::size_t factor) const;
  at::ScalarType computes_in(const Entry& entry) const;

  std::vector<Entry> factors_;
  std::optional<Routes> routes_;
  std::vector<Course> courses_;  ///< By factor.
  c10::Device device_ = at::kCPU;
  c10::DataPtr memory_;
  std::map<std::size_t, at::Tensor> held_;  ///< By factor: the bytes of the whole.
  std::int64_t bytes_ = 0;
};

}  // namespace fsdp::weights
