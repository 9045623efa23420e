#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/granularity.h"

// How the bytes of a unit are cut over the ranks. Pure arithmetic: no tensors, no processes; a layout for 16,384 ranks
// costs microseconds.
namespace fsdp::layout {

/// Sub-buffers start at multiples of this many bytes. With element and whole granularity, so do the parameters and the
/// shards in them: vector loads and BLAS paths then see the same alignment as in a freshly allocated tensor (bit-identical
/// results), and NCCL takes its fast path. Rows and blocks set their own multiples and can't have this one as well.
inline constexpr std::int64_t kAlignment = 64;

/// The facts about a parameter that the layout needs.
struct ParameterTraits {
  std::string name;
  std::vector<std::int64_t> shape;  ///< Any: 0-D, empty (a 0 in the shape), single-row.
  std::int32_t dtype = 0;           ///< Opaque key; parameters of different dtypes never share a sub-buffer.
  std::int64_t itemsize = 4;        ///< Bytes per element.
  bool trainable = true;            ///< Frozen and trainable parameters never share a sub-buffer.
  Granularity granularity;
  /// An alignment in elements; 0 stands for kAlignment bytes. With element and whole granularity, parameters start and shards end at
  /// multiples of it. It is used for elements that are also stored in a narrower dtype, or in blocks.
  std::int64_t alignment = 0;
};

/// A part of the unit's buffer that is cut into `world_size` equal shards: rank r owns its elements
/// [r * shard_numel, (r + 1) * shard_numel).
struct SubBuffer {
  std::int32_t dtype = 0;
  std::int64_t itemsize = 4;
  bool trainable = true;
  Granularity::Kind kind = Granularity::Kind::kElement;
  /// Elements; every shard boundary and the start of every parameter that isn't empty is a multiple of it. kRows: the size of
  /// a row, that is, the product of the sizes after the first (1 for 0-D, 1-D and rows without elements). kBlock: the block. kElement
  /// and kWhole: the parameters' alignment.
  std::int64_t quantum = 1;
  std::int64_t shard_numel = 0;        ///< Elements per rank; 0 if all its parameters are empty.
  std::int64_t payload_numel = 0;      ///< Elements that belong to parameters; the rest is padding.
  std::int64_t byte_offset = 0;        ///< The position of its first byte in the unit's full buffer; a multiple of kAlignment.
  std::int64_t shard_byte_offset = 0;  ///< The position of its shard in a rank's shard buffer; a multiple of kAlignment.
};

/// Where a parameter lies. An empty one has a valid offset, too (at most the size of the sub-buffer).
struct ParameterPosition {
  std::size_t sub_buffer = 0;
  std::int64_t offset = 0;  ///< Elements from the start of the sub-buffer.
  std::int64_t numel = 0;
};

/// The piece of one parameter that one rank owns; numel is 0 if it owns nothing of it (the offsets are then 0).
struct LocalSlice {
  std::int64_t parameter_offset = 0;  ///< Elements from the start of the (flattened) parameter.
  std::int64_t shard_offset = 0;      ///< Elements from the start of the rank's shard of the sub-buffer.
  std::int64_t numel = 0;
  bool operator==(const LocalSlice&) const = default;
};

/// The layout of one unit over `world_size` ranks.
///
/// Parameters of equal (dtype, trainable, granularity, row or block size) share a sub-buffer, so no padding to a common
/// multiple of row sizes is ever needed. They lie in their given order, except that whole parameters are packed into ranks,
/// largest first. Trainable sub-buffers come first (and, within that, in the order of their first parameters): the gradient
/// buffer has the same layout as the prefix of `trainable_bytes()` bytes. The same arguments give the same layout on all ranks.
class UnitLayout {
 public:
  /// Throws fsdp::Error if world_size < 1, a shape has a negative size, an itemsize is not in {1, 2, 4, 8, 16}, a block is < 1
  /// or the buffer would exceed 2^63 - 1 bytes; the message names the parameter.
  UnitLayout(std::vector<ParameterTraits> parameters, std::int64_t world_size);

  std::int64_t world_size() const { return world_size_; }
  const std::vector<ParameterTraits>& parameters() const { return parameters_; }
  const std::vector<ParameterPosition>& positions() const { return positions_; }
  const std::vector<SubBuffer>& sub_buffers() const { return sub_buffers_; }
  std::size_t trainable_sub_buffers() const { return trainable_sub_buffers_; }

  // All are multiples of kAlignment. Where shards are not, full_bytes() is less than world_size() * shard_bytes().
  std::int64_t full_bytes() const { return full_bytes_; }                        ///< The size of the gathered parameters.
  std::int64_t trainable_bytes() const { return trainable_bytes_; }              ///< The size of the unreduced gradients.
  std::int64_t shard_bytes() const { return shard_bytes_; }                      ///< The size of one rank's parameter shard.
  std::int64_t trainable_shard_bytes() const { return trainable_shard_bytes_; }  ///< The size of one rank's gradient shard.
  std::int64_t padding_bytes() const;                                            ///< full_bytes() less the parameters' bytes.

  /// Returns the slice of a parameter (an index into parameters()) that `rank` owns, in constant time.
  LocalSlice local_slice(std::size_t parameter, std::int64_t rank) const { return local_slice(parameter, rank, 1); }

  /// Returns the slice that `ranks` consecutive ranks, from `first_rank` on, own together. shard_offset counts from the shard of the first
  /// one.
  LocalSlice local_slice(std::size_t parameter, std::int64_t first_rank, std::int64_t ranks) const;

 private:
  std::vector<ParameterTraits> parameters_;
  std::int64_t world_size_;
  std::vector<ParameterPosition> positions_;
  std::vector<SubBuffer> sub_buffers_;
  std::size_t trainable_sub_buffers_ = 0;
  std::int64_t full_bytes_ = 0;
  std::int64_t trainable_bytes_ = 0;
  std::int64_t shard_bytes_ = 0;
  std::int64_t trainable_shard_bytes_ = 0;
};

}  // namespace fsdp::layout
