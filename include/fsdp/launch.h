#pragma once

#include <functional>

namespace fsdp {

/// Starts `nproc` ranks of `fn` on this machine, waits for them, and returns 0 if all returned 0 without an exception. Otherwise
/// prints to stderr, for each rank that failed of its own, its rank and message (exception text, exit code or signal), ends the other
/// ranks, and returns 1 (or the failing rank's exit code if it is not 0 or 1). A rank that leaves by exit() before `fn` has returned has
/// failed, whatever the code, and so has one that returns less than 0 or more than 255.
///
/// Each rank is a process with RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE set; OMP_NUM_THREADS is set to
/// cores / nproc (at least 1) unless it is set already. If this process is itself a rank (torchrun, mpirun, srun), `fn` runs right here
/// and `nproc` is ignored.
///
/// SIGTERM to this process is passed on to the ranks, once: a program may handle it in `fn`'s processes, save, and return 0. Ranks that do
/// not handle it end by it, and then so does this process.
///
/// Ranks are forked while this process has one thread only. Once torch has started threads, a fork would copy locked locks: then
/// the program runs itself again with its own arguments, once per rank, and in those processes this call runs `fn` and exits. Earlier
/// calls return there what they returned here, without running anything; so the copies take the same way to this one. Call it from one
/// thread at a time.
int launch_local(int nproc, const std::function<int()>& fn);

/// True if a launcher's variables (RANK and WORLD_SIZE, or those of mpirun or srun) say that this process is one of several ranks.
bool is_launched();

}  // namespace fsdp
