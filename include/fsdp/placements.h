#pragma once

#include <cstdint>
#include <string>

namespace fsdp {

/// How parameters, gradients, or optimizer state (with the main parameters) are placed on the ranks of the data-parallel dimension.
enum class Placement : std::uint8_t { kReplicated, kSharded };

/// The placements of parameters, gradients and optimizer state, from which the engine derives every collective. On a 1-D mesh, four
/// combinations are allowed, which have names:
///
/// | name                                  | parameters | gradients | optimizer |
/// |---------------------------------------|------------|-----------|-----------|
/// | no_shard (ZeRO-0, DDP)                | replicated | replicated| replicated|
/// | optim (ZeRO-1)                        | replicated | replicated| sharded   |
/// | optim_grads (ZeRO-2)                  | replicated | sharded   | sharded   |
/// | optim_grads_params (ZeRO-3, FSDP)     | sharded    | sharded   | sharded   |
struct Placements {
  Placement parameters = Placement::kSharded;  ///< What forward and backward compute with, between its uses.
  Placement gradients = Placement::kSharded;   ///< Once they are reduced.
  Placement optimizer = Placement::kSharded;   ///< The optimizer's state, and the main parameters that it updates.

  static constexpr Placements no_shard() { return {Placement::kReplicated, Placement::kReplicated, Placement::kReplicated}; }  ///< ZeRO-0
  static constexpr Placements optim() { return {Placement::kReplicated, Placement::kReplicated, Placement::kSharded}; }        ///< ZeRO-1
  static constexpr Placements optim_grads() { return {Placement::kReplicated, Placement::kSharded, Placement::kSharded}; }     ///< ZeRO-2
  static constexpr Placements optim_grads_params() { return {}; }                                                              ///< ZeRO-3

  /// By one of the four names above or Megatron-FSDP's digits "0" to "3". Throws Error naming the choices.
  static Placements from_name(const std::string& name);
  bool operator==(const Placements&) const = default;
};

}  // namespace fsdp
