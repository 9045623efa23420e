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

/// The factors of products that are added to tensors when these are packed: LoRA's adapters. Ranks have parts of the factors, as of any
/// tensor. Complete factors are gathered, which costs little because they are thin, and each rank computes the product for its own part of
/// the tensor. Not thread-safe.
class Adapters {
 public:
  Adapters() = default;
  /// Factors are gathered, and products computed, on the device of `mesh`. Collective over the ranks of the factors. Throws CommError.
  Adapters(std::vector<Entry> factors, const DeviceMesh& mesh);

  /// Allocates memory for the factors of `entries`, and copies this rank's parts there. Returns the bytes that are in use until release(),
  /// including those of merge().
  std::int64_t hold(std::span<const Entry* const> entries);
  /// Gathers the other ranks' parts of these factors. Collective over the ranks of the factors. Throws CommError.
  void gather(const comm::Label& label);
  /// Arranges the data that have arrived, before they are used.
  void put_in_order();
  /// Writes this rank's part of an entry, with its products added, to `to`: 1-D, of the dtype that is sent. Products and sums are computed
  /// in fp32 (fp64, if one of the tensors has it), and the sum is rounded once.
  void merge(const at::Tensor& to, const Entry& entry) const;
  /// Frees the memory. Returns what hold() returned.
  std::int64_t release();

 private:
  at::Tensor whole(std::size_t factor) const;
  at::ScalarType computes_in(const Entry& entry) const;

  std::vector<Entry> factors_;
  std::optional<Routes> routes_;
  std::vector<Course> courses_;  ///< By factor.
  c10::Device device_ = at::kCPU;
  c10::DataPtr memory_;
  std::map<std::size_t, at::Tensor> held_;  ///< By factor: the bytes of the complete factor.
  std::int64_t bytes_ = 0;
};

}  // namespace fsdp::weights
