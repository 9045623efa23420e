#include "comm/parts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "base/parallel_copy.h"
#include "base/rounded_blocks.h"
#include "comm/call.h"
#include "comm/rank_order_sum.h"
#include "comm/rounded_sum.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

[[noreturn]] void throw_misfit(const char* operation, const std::string& what) {
  throw Error(std::string(operation) + ": the tensors of a part do not fit together: " + what);
}

void check_flat(const char* operation, const char* name, const at::Tensor& tensor) {
  if (tensor.dim() == 1 && tensor.is_contiguous()) return;
  throw_misfit(operation, std::string(name) + " is not 1-D and contiguous");
}

void check_encoded(const ReducePart& part, const Traffic& traffic) {
  constexpr const char* kOperation = "reduce-scatter";
  const std::int64_t numel = part.out.numel();
  if (part.unreduced.scalar_type() == at::kDouble) throw_misfit(kOperation, "double is not encoded");
  const std::int64_t staging = traffic.staging_bytes(numel, part.encoding->format, part.unreduced.scalar_type());
  if (staging > 0 && (part.staging.scalar_type() != at::kByte || part.staging.numel() < staging)) {
    throw_misfit(kOperation, "staging must have " + std::to_string(staging) + " bytes");
  }
  const std::int64_t lost = traffic.contributions() * numel;
  if (part.encoding->format.error_feedback && (!part.encoding->lost.defined() || part.encoding->lost.numel() != lost)) {
    throw_misfit(kOperation, "error feedback needs " + std::to_string(lost) + " elements");
  }
}

std::uint64_t add_size(std::uint64_t hash, std::int64_t numel, at::ScalarType dtype) {
  return mix(mix(hash, static_cast<std::uint64_t>(numel)), static_cast<std::uint64_t>(dtype));
}

}  // namespace

std::int64_t check_parts(std::span<const GatherPart> parts, int size) {
  constexpr const char* kOperation = "all-gather";
  std::int64_t bytes = 0;
  for (const GatherPart& part : parts) {
    check_flat(kOperation, "full", part.full);
    check_flat(kOperation, "shard", part.shard);
    if (part.full.dtype() != part.shard.dtype()) throw_misfit(kOperation, "full and shard have different dtypes");
    if (part.full.numel() != size * part.shard.numel()) {
      throw_misfit(kOperation, "full has " + std::to_string(part.full.numel()) + " elements, but " + std::to_string(size) +
                                   " shards have " + std::to_string(size * part.shard.numel()));
    }
    bytes += static_cast<std::int64_t>(part.shard.nbytes());
  }
  return bytes;
}

std::int64_t check_parts(std::span<const ReducePart> parts, const Communicator& communicator) {
  constexpr const char* kOperation = "reduce-scatter";
  std::int64_t bytes = 0;
  for (const ReducePart& part : parts) {
    const std::int64_t numel = part.out.numel();
    check_flat(kOperation, "unreduced", part.unreduced);
    check_flat(kOperation, "out", part.out);
    check_summable(part.unreduced.scalar_type());
    check_summable(part.out.scalar_type());
    if (part.unreduced.numel() != communicator.size() * numel) {
      throw_misfit(kOperation, "unreduced has " + std::to_string(part.unreduced.numel()) + " elements, but " +
                                   std::to_string(communicator.size()) + " shards have " + std::to_string(communicator.size() * numel));
    }
    if (!part.gives.empty() && part.gives.size() != static_cast<std::size_t>(communicator.size())) {
      throw_misfit(kOperation, std::to_string(part.gives.size()) + " flags for " + std::to_string(communicator.size()) + " ranks");
    }
    if (part.encoding) {
      check_encoded(part, communicator.traffic());
    } else if (const std::int64_t staging = communicator.staging_numel(numel, part.unreduced.scalar_type()); staging > 0) {
      check_flat(kOperation, "staging", part.staging);
      if (part.staging.numel() < staging || part.staging.dtype() != part.unreduced.dtype()) {
        throw_misfit(kOperation, "staging must have " + std::to_string(staging) + " elements of unreduced's dtype");
      }
    }
    bytes += numel * static_cast<std::int64_t>(part.unreduced.itemsize());
  }
  return bytes;
}

Sent sent_in_reduction(const Traffic& traffic, std::span<const ReducePart> parts, std::int64_t bytes) {
  std::int64_t summed = 0, encoded = 0;
  for (const ReducePart& part : parts) {
    summed += part.out.numel() * static_cast<std::int64_t>(elementSize(sum_dtype(part.unreduced.scalar_type())));
    if (part.encoding) encoded += contribution_bytes(part);
  }
  return encoded > 0 ? traffic.sent_encoded(bytes, encoded) : traffic.sent(bytes, summed);
}

std::int64_t check_parts(std::span<const ScatterPart> parts, int root, const Communicator& communicator) {
  constexpr const char* kOperation = "scatter";
  std::int64_t bytes = 0;
  for (const ScatterPart& part : parts) {
    check_flat(kOperation, "into", part.into);
    if (communicator.rank() != root) continue;
    if (part.shards.size() != static_cast<std::size_t>(communicator.size())) {
      throw_misfit(kOperation, std::to_string(part.shards.size()) + " shards for " + std::to_string(communicator.size()) + " ranks");
    }
    for (int rank = 0; rank < communicator.size(); ++rank) {
      const at::Tensor& shard = part.shards[static_cast<std::size_t>(rank)];
      check_flat(kOperation, "a shard", shard);
      if (shard.dtype() != part.into.dtype()) throw_misfit(kOperation, "a shard and into have different dtypes");
      if (rank != root) {
        bytes += static_cast<std::int64_t>(shard.nbytes());
      } else if (shard.numel() != part.into.numel()) {
        throw_misfit(kOperation,
                     "the root's shard has " + std::to_string(shard.numel()) + " elements, into has " + std::to_string(part.into.numel()));
      }
    }
  }
  return bytes;
}

std::int64_t check_parts(std::span<const UnevenPart> parts, const std::vector<bool>& receives, const Communicator& communicator) {
  constexpr const char* kOperation = "uneven gather";
  const auto ranks = static_cast<std::size_t>(communicator.size()), own = static_cast<std::size_t>(communicator.rank());
  if (receives.size() != ranks)
    throw_misfit(kOperation, std::to_string(receives.size()) + " flags for " + std::to_string(ranks) + " ranks");
  std::int64_t bytes = 0;
  for (const UnevenPart& part : parts) {
    if (part.bytes.size() != ranks) {
      throw_misfit(kOperation, std::to_string(part.bytes.size()) + " sizes for " + std::to_string(ranks) + " ranks");
    }
    const auto expect = [](const char* name, const at::Tensor& tensor, std::int64_t size) {
      check_flat(kOperation, name, tensor);
      if (tensor.scalar_type() == at::kByte && tensor.numel() == size) return;
      throw_misfit(kOperation, std::string(name) + " must have " + std::to_string(size) + " bytes");
    };
    expect("own", part.own, part.bytes[own]);
    if (receives[own]) expect("whole", part.whole, std::accumulate(part.bytes.begin(), part.bytes.end(), std::int64_t{0}));
    bytes += part.bytes[own];
  }
  return bytes * (std::count(receives.begin(), receives.end(), true) - (receives[own] ? 1 : 0));
}

std::uint64_t sizes_of(std::span<const GatherPart> parts) {
  std::uint64_t hash = parts.size();
  for (const GatherPart& part : parts) hash = add_size(hash, part.shard.numel(), part.shard.scalar_type());
  return hash;
}

std::uint64_t sizes_of(std::span<const ReducePart> parts) {
  std::uint64_t hash = parts.size();
  for (const ReducePart& part : parts) {
    hash = add_size(hash, part.out.numel(), part.unreduced.scalar_type());
    for (const bool one : part.gives) hash = mix(hash, one ? 1 : 0);
    if (!part.encoding) continue;
    hash = mix(mix(mix(hash, part.encoding->key), part.encoding->reduction_number), hash_of(part.encoding->format));
  }
  return hash;
}

std::uint64_t sizes_of(std::span<const UnevenPart> parts, const std::vector<bool>& receives) {
  std::uint64_t hash = parts.size();
  for (const UnevenPart& part : parts) {
    for (const std::int64_t bytes : part.bytes) hash = mix(hash, static_cast<std::uint64_t>(bytes));
  }
  for (const bool one : receives) hash = mix(hash, one ? 1 : 0);
  return hash;
}

bool gives(std::span<const ReducePart> parts, int rank) {
  return parts.empty() || parts.front().gives.empty() || parts.front().gives[static_cast<std::size_t>(rank)];
}

at::Tensor unreduced_or_zeros(const ReducePart& part, int rank) {
  return gives({&part, 1}, rank) ? part.unreduced : at::zeros({part.unreduced.numel()}, part.unreduced.options());
}

bool overlaps(const at::Tensor& a, const at::Tensor& b) {
  const auto* begin_a = static_cast<const char*>(a.const_data_ptr());
  const auto* begin_b = static_cast<const char*>(b.const_data_ptr());
  return begin_a < begin_b + b.nbytes() && begin_b < begin_a + a.nbytes();
}

void copy_root_shard(const ScatterPart& part, int root) {
  const at::Tensor& shard = part.shards[static_cast<std::size_t>(root)];
  if (shard.numel() == 0 || shard.const_data_ptr() == part.into.const_data_ptr()) return;
  const at::NoGradGuard no_grad;
  flat_view(part.into, 0, part.into.numel()).copy_(flat_view(shard, 0, shard.numel()));
}

at::Tensor region_of_rank(const UnevenPart& part, int rank) {
  return flat_view(part.whole, std::accumulate(part.bytes.begin(), part.bytes.begin() + rank, std::int64_t{0}),
                   part.bytes[static_cast<std::size_t>(rank)]);
}

void copy_own_bytes(const UnevenPart& part, int rank) {
  if (!part.whole.defined() || part.own.numel() == 0) return;
  const at::Tensor region = region_of_rank(part, rank);
  if (region.const_data_ptr() == part.own.const_data_ptr()) return;
  const at::NoGradGuard no_grad;
  region.copy_(flat_view(part.own, 0, part.own.numel()));
}

at::Tensor flat_view(const at::Tensor& tensor, std::int64_t offset, std::int64_t numel) {
  const c10::DispatchKeySet keys(c10::computeDispatchKey(tensor.scalar_type(), at::kStrided, tensor.device()));
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), keys, tensor.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset() + offset);
  view.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return view;
}

c10::DataPtr memory_of(at::Tensor tensor) {
  void* const data = tensor.mutable_data_ptr();
  const auto device = tensor.device();
  return {data, new at::Tensor(std::move(tensor)), [](void* context) { delete static_cast<at::Tensor*>(context); }, device};
}

void copy_own_shard(const GatherPart& part, int rank) {
  const std::size_t bytes = part.shard.nbytes();
  if (bytes == 0) return;
  char* region = static_cast<char*>(part.full.mutable_data_ptr()) + static_cast<std::size_t>(rank) * bytes;
  if (region == part.shard.const_data_ptr()) return;
  if (part.full.is_cpu()) {
    parallel_copy(region, part.shard.const_data_ptr(), static_cast<std::int64_t>(bytes));
  } else {
    const at::NoGradGuard no_grad;
    const std::int64_t numel = part.shard.numel();
    flat_view(part.full, rank * numel, numel).copy_(flat_view(part.shard, 0, numel));
  }
}

}  // namespace fsdp::comm
