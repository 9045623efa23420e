#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/unit.h"
#include "fsdp/fully_shard.h"
#include "shard/unit_division.h"

// The initial values of parameters and buffers.
namespace fsdp::shard {

/// Fills the main parameters of a unit, whose memory is zero, with the values of the parameters in its plan. Collective over the unit's
/// ranks if the values come from its first rank, which then briefly holds the complete unit. An error with this rank's own values is thrown
/// after the rank has taken part. `checksums` gets the checksums of the rank's own values (kOwn), one per parameter: of all elements with
/// check_initial_values, otherwise of engine::kSampledElements.
void fill_main(engine::Unit& unit, const UnitPlan& plan, const FullyShardOptions& options, std::vector<std::int64_t>& checksums);

/// Compares the checksums of the unit's parameters over the ranks of its mesh. Collective over these ranks. Throws Error on all of them if
/// checksums differ.
void expect_same_values(const UnitPlan& plan, const std::vector<std::int64_t>& checksums);

/// Call it after the parameters of all units are paged. Buffers and ignored parameters that deferred_init made get memory on the units'
/// device. If the values of parameters come from the first rank of each unit's mesh, buffers and ignored parameters get theirs from it,
/// too. `units` are those of `plans`. It is collective and throws in the same way as fill_main().
void fill_buffers(const std::vector<UnitPlan>& plans, const std::vector<std::unique_ptr<engine::Unit>>& units, InitialValues from);

/// Returns a text that ranks compare: where the values come from, and if they are sent, the names, shapes and dtypes of buffers and ignored
/// parameters. Throws Error if one of these is not dense.
std::string describe(const torch::nn::Module& root, const FullyShardOptions& options);

}  // namespace fsdp::shard
