#pragma once

#include "fsdp/device_mesh.h"

namespace fsdp {

/// Returns true on every rank of the mesh once one of them has received SIGINT (Ctrl-C) or SIGTERM. Call it after each step. If it returns
/// true, save and leave the loop: the ranks then end after the same step. launch_local and torchrun pass these signals on to their ranks.
///
/// The first call installs signal handlers in this process, which replace those of the program. Before it, both signals end the process, as
/// by default; after it, they have no other effect. Collective; blocks. Throws CommError.
bool stop_requested(const DeviceMesh& mesh);

}  // namespace fsdp
