#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/unit.h"
#include "fsdp/fully_shard.h"
#include "shard/unit_division.h"

// The first values of parameters and buffers.
namespace fsdp::shard {

/// Fills the main parameters of a unit, whose memory is zero, from those of its plan. Collective over the unit's ranks if
/// the values come from its first rank, which then holds the unit whole for the moment. What goes wrong with this rank's own values is
/// thrown after it has taken part. `checksums`, if given, gets those of the rank's own values (kOwn), one per parameter.
void fill_main(engine::Unit& unit, const UnitPlan& plan, InitialValues from, std::vector<std::int64_t>* checksums = nullptr);

/// Compares the checksums of the unit's parameters over the ranks of its mesh. Collective over these. Throws Error on all of them.
void expect_same_values(const UnitPlan& plan, const std::vector<std::int64_t>& checksums);

/// Once the parameters of all units are paged: gives the buffers, and the parameters that are ignored, memory on the units' device if
/// deferred_init made them, and all of them the values of the first rank of their unit's mesh if the parameters' come from there. `units`
/// are those of `plans`. As above in the rest.
void fill_buffers(const std::vector<UnitPlan>& plans, const std::vector<std::unique_ptr<engine::Unit>>& units, InitialValues from);

/// For ranks to compare: from where the values come; and names, shapes and dtypes of the buffers if they are sent.
std::string describe(const torch::nn::Module& root, InitialValues from);

}  // namespace fsdp::shard
