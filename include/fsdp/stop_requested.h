#pragma once

#include "fsdp/device_mesh.h"

namespace fsdp {

/// True on every rank of the mesh once SIGINT (Ctrl-C) or SIGTERM has come to one of them. Ask it after each step, and save and return from
/// the loop if it is true: the ranks then end after the same step. launch_local and torchrun pass these signals on to their ranks.
///
/// The first call makes this process listen, in place of handlers that the program has set. Until then both signals end the process, as
/// they do by default, and afterwards they do nothing else. Collective; blocks. Throws CommError.
bool stop_requested(const DeviceMesh& mesh);

}  // namespace fsdp
