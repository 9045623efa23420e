#include "comm/pieces.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/TensorOptions.h>

#include <cstring>
#include <string>

#include "comm/call.h"
#include "comm/rank_order_sum.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

[[noreturn]] void throw_misfit(const char* operation, const std::string& what) {
  throw Error(std::string(operation) + ": the tensors of a piece do not fit together: " + what);
}

void check_flat(const char* operation, const char* name, const at::Tensor& tensor) {
  if (tensor.dim() == 1 && tensor.is_contiguous()) return;
  throw_misfit(operation, std::string(name) + " is not 1-D and contiguous");
}

std::uint64_t add_size(std::uint64_t hash, std::int64_t numel, at::ScalarType dtype) {
  return mix(mix(hash, static_cast<std::uint64_t>(numel)), static_cast<std::uint64_t>(dtype));
}

}  // namespace

std::int64_t check_pieces(std::span<const GatherPiece> pieces, int size) {
  constexpr const char* kOperation = "all-gather";
  std::int64_t bytes = 0;
  for (const GatherPiece& piece : pieces) {
    check_flat(kOperation, "full", piece.full);
    check_flat(kOperation, "shard", piece.shard);
    if (piece.full.dtype() != piece.shard.dtype()) throw_misfit(kOperation, "full and shard have different dtypes");
    if (piece.full.numel() != size * piece.shard.numel()) {
      throw_misfit(kOperation, "full has " + std::to_string(piece.full.numel()) + " elements, but " + std::to_string(size) +
                                   " shards have " + std::to_string(size * piece.shard.numel()));
    }
    bytes += static_cast<std::int64_t>(piece.shard.nbytes());
  }
  return bytes;
}

std::int64_t check_pieces(std::span<const ReducePiece> pieces, const Communicator& communicator) {
  constexpr const char* kOperation = "reduce-scatter";
  std::int64_t bytes = 0;
  for (const ReducePiece& piece : pieces) {
    const std::int64_t numel = piece.out.numel();
    check_flat(kOperation, "unreduced", piece.unreduced);
    check_flat(kOperation, "out", piece.out);
    check_summable(piece.unreduced.scalar_type());
    check_summable(piece.out.scalar_type());
    if (piece.unreduced.numel() != communicator.size() * numel) {
      throw_misfit(kOperation, "unreduced has " + std::to_string(piece.unreduced.numel()) + " elements, but " +
                                   std::to_string(communicator.size()) + " shards have " + std::to_string(communicator.size() * numel));
    }
    const std::int64_t staging = communicator.staging_numel(numel, piece.unreduced.scalar_type());
    if (staging > 0) {
      check_flat(kOperation, "staging", piece.staging);
      if (piece.staging.numel() < staging || piece.staging.dtype() != piece.unreduced.dtype()) {
        throw_misfit(kOperation, "staging must have " + std::to_string(staging) + " elements of unreduced's dtype");
      }
    }
    bytes += numel * static_cast<std::int64_t>(piece.unreduced.itemsize());
  }
  return bytes;
}

std::int64_t check_pieces(std::span<const ScatterPiece> pieces, int root, const Communicator& communicator) {
  constexpr const char* kOperation = "scatter";
  std::int64_t bytes = 0;
  for (const ScatterPiece& piece : pieces) {
    check_flat(kOperation, "into", piece.into);
    if (communicator.rank() != root) continue;
    if (piece.parts.size() != static_cast<std::size_t>(communicator.size())) {
      throw_misfit(kOperation, std::to_string(piece.parts.size()) + " parts for " + std::to_string(communicator.size()) + " ranks");
    }
    for (int rank = 0; rank < communicator.size(); ++rank) {
      const at::Tensor& part = piece.parts[static_cast<std::size_t>(rank)];
      check_flat(kOperation, "a part", part);
      if (part.dtype() != piece.into.dtype()) throw_misfit(kOperation, "a part and into have different dtypes");
      if (rank != root) {
        bytes += static_cast<std::int64_t>(part.nbytes());
      } else if (part.numel() != piece.into.numel()) {
        throw_misfit(kOperation,
                     "the root's part has " + std::to_string(part.numel()) + " elements, into has " + std::to_string(piece.into.numel()));
      }
    }
  }
  return bytes;
}

std::uint64_t sizes_of(std::span<const GatherPiece> pieces) {
  std::uint64_t hash = pieces.size();
  for (const GatherPiece& piece : pieces) hash = add_size(hash, piece.shard.numel(), piece.shard.scalar_type());
  return hash;
}

std::uint64_t sizes_of(std::span<const ReducePiece> pieces) {
  std::uint64_t hash = pieces.size();
  for (const ReducePiece& piece : pieces) hash = add_size(hash, piece.out.numel(), piece.unreduced.scalar_type());
  return hash;
}

void copy_own_part(const ScatterPiece& piece, int root) {
  const at::Tensor& part = piece.parts[static_cast<std::size_t>(root)];
  if (part.numel() == 0 || part.const_data_ptr() == piece.into.const_data_ptr()) return;
  const at::NoGradGuard no_grad;
  flat_view(piece.into, 0, piece.into.numel()).copy_(flat_view(part, 0, part.numel()));
}

at::Tensor flat_view(const at::Tensor& tensor, std::int64_t offset, std::int64_t numel) {
  const c10::DispatchKeySet keys(c10::computeDispatchKey(tensor.scalar_type(), at::kStrided, tensor.device()));
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), keys, tensor.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset() + offset);
  view.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return view;
}

void copy_own_shard(const GatherPiece& piece, int rank) {
  const std::size_t bytes = piece.shard.nbytes();
  if (bytes == 0) return;
  char* region = static_cast<char*>(piece.full.mutable_data_ptr()) + static_cast<std::size_t>(rank) * bytes;
  if (region == piece.shard.const_data_ptr()) return;
  if (piece.full.is_cpu()) {
    std::memcpy(region, piece.shard.const_data_ptr(), bytes);
  } else {
    const at::NoGradGuard no_grad;
    const std::int64_t numel = piece.shard.numel();
    flat_view(piece.full, rank * numel, numel).copy_(flat_view(piece.shard, 0, numel));
  }
}

}  // namespace fsdp::comm
