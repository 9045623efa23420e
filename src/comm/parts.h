#pragma once

#include <cstdint>
#include <span>

#include "comm/communicator.h"

// Functions on the parts of a collective, for all communicators.
namespace fsdp::comm {

/// Throw Error if the tensors of a part do not fit together (communicator.h states what is required). Return the size of all shards in
/// bytes, in the dtype that is sent.
std::int64_t check_parts(std::span<const GatherPart> parts, int size);
std::int64_t check_parts(std::span<const ReducePart> parts, const Communicator& communicator);
/// The bytes that a rank sends in a reduction of these parts, whose shards have `bytes`.
Sent sent_in_reduction(const Traffic& traffic, std::span<const ReducePart> parts, std::int64_t bytes);
/// Returns the bytes that this rank sends, which is 0 on all ranks except the root.
std::int64_t check_parts(std::span<const ScatterPart> parts, int root, const Communicator& communicator);

/// Returns the bytes that this rank sends.
std::int64_t check_parts(std::span<const UnevenPart> parts, const std::vector<bool>& receives, const Communicator& communicator);

/// A hash of the parts' sizes and dtypes, which must be the same on all ranks.
std::uint64_t sizes_of(std::span<const GatherPart> parts);
std::uint64_t sizes_of(std::span<const ReducePart> parts);
std::uint64_t sizes_of(std::span<const UnevenPart> parts, const std::vector<bool>& receives);

/// Whether the gradients of `rank` count in a reduction of these parts.
bool gives(std::span<const ReducePart> parts, int rank);
/// Zeros in place of `unreduced`, on a rank whose gradients do not count.
at::Tensor unreduced_or_zeros(const ReducePart& part, int rank);

/// Whether two tensors, each dense, share memory.
bool overlaps(const at::Tensor& a, const at::Tensor& b);

/// Fills the root's own `into`, unless it is its shard.
void copy_root_shard(const ScatterPart& part, int root);

/// Fills this rank's region of `whole`, if there is one, from `own`, unless that is the region.
void copy_own_bytes(const UnevenPart& part, int rank);

/// The bytes of `rank` in `whole`.
at::Tensor region_of_rank(const UnevenPart& part, int rank);

/// Elements [offset, offset + numel) of a 1-D contiguous tensor. Unlike narrow(), it costs no dispatch, and drops dispatch keys, such as
/// the key of paging.
at::Tensor flat_view(const at::Tensor& tensor, std::int64_t offset, std::int64_t numel);

/// Fills this rank's own region of the gathered buffer from its shard, unless the shard is that region.
void copy_own_shard(const GatherPart& part, int rank);

/// Returns a tensor's memory, which is kept as long as the result exists.
c10::DataPtr memory_of(at::Tensor tensor);

}  // namespace fsdp::comm
