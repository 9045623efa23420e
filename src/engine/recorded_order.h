#pragma once

#include <cstddef>
#include <vector>

#include "engine/engine.h"

namespace fsdp::engine {

/// The units that the engine's last pass of this kind has entered, in its order. Backward begins in the unit in which forward has ended,
/// and in the units around it, so these are the first. Empty before the first pass.
std::vector<std::size_t> recorded_order(Engine& engine, Pass pass);

}  // namespace fsdp::engine
