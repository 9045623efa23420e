#pragma once

#include <cstdint>

namespace fsdp {

/// Where a boundary between two ranks' shards may cut a parameter. (Idea: veScale-FSDP's RaggedShard and Megatron-FSDP's
/// chunk_size_factor.)
struct Granularity {
  /// The four granularities.
  enum class Kind : std::uint8_t {
    kElement,  ///< Anywhere. Suits elementwise optimizers, and needs the least padding. The default.
    kRows,     ///< Between rows of dim 0 only, so that a shard is a valid uneven Shard(0).
    kBlock,    ///< Between blocks of `block` consecutive elements, counted from the parameter's start.
    kWhole,    ///< Nowhere: one rank owns the complete parameter (Muon and other matrix optimizers).
  };
  Kind kind = Kind::kElement;  ///< The granularity.
  std::int64_t block = 1;      ///< Elements per block; read for kBlock only, at least 1.

  static constexpr Granularity element() { return {}; }                                            ///< Kind::kElement.
  static constexpr Granularity rows() { return {Kind::kRows, 1}; }                                 ///< Kind::kRows.
  static constexpr Granularity blocks(std::int64_t elements) { return {Kind::kBlock, elements}; }  ///< Kind::kBlock.
  static constexpr Granularity whole() { return {Kind::kWhole, 1}; }                               ///< Kind::kWhole.
  bool operator==(const Granularity&) const = default;
};

}  // namespace fsdp
