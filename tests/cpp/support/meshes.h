#pragma once

#include "fsdp/device_mesh.h"

namespace fsdp::testing {

/// All ranks in a row, and in two.
inline DeviceMesh line() { return init_device_mesh("cpu", {{"dp_shard", -1}}); }
inline DeviceMesh plane() { return init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", -1}}); }

}  // namespace fsdp::testing
