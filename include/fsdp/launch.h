#pragma once

#include <functional>

namespace fsdp {

/// Options of launch_local().
struct LaunchOptions {
  /// Whether each line that a rank writes to stdout or stderr begins with the rank's number, as in "[1] loss 2.5". The ranks then write to
  /// pipes instead of the terminal, and this process prints complete lines. It has no effect on the ranks of another launcher.
  bool prefix_output = false;
  /// How often all ranks are started again after one has failed. They begin anew, so the program must load the newest checkpoint
  /// (load_latest()). After SIGINT or SIGTERM to this process, none is started. It has no effect on the ranks of another launcher.
  int max_restarts = 0;
};

/// Starts `nproc` ranks of `fn` on this machine, waits for them, and returns 0 if all returned 0 without an exception. If a rank fails,
/// this prints its rank and message (exception text, exit code or signal) to stderr, ends the other ranks, and returns 1 (or the failing
/// rank's exit code if it is not 0 or 1). If several ranks have the same message, it is printed once. Ranks that failed only because of
/// another rank are not printed, unless that rank has returned 0, which is then printed. A rank also fails if it calls exit() before `fn`
/// has returned, with any code, or if it returns less than 0 or more than 255. If a rank can't be started, this prints the reason, ends the
/// ranks that were started, and returns 1.
///
/// Each rank is a process with RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE set. OMP_NUM_THREADS is set to cores / nproc (at least 1),
/// unless it is set already. If this process is itself a rank (of torchrun, mpirun, srun), it calls `fn` and ignores `nproc`.
///
/// SIGINT and SIGTERM to this process are passed on to the ranks, each once. A program may handle them in the ranks (stop_requested()
/// does), save, and return 0. Otherwise they end the ranks, and then this process. A second SIGINT two seconds or more after the first one
/// ends this process and the ranks at once.
///
/// Ranks are forked. Call it before the first tensor operation: once torch has started threads, their locks would stay locked in the ranks,
/// so this prints an error and returns 1.
int launch_local(int nproc, const std::function<int()>& fn, LaunchOptions options = {});

/// True if a launcher's variables (RANK and WORLD_SIZE, or those of mpirun or srun) show that this process is one of several ranks.
bool is_launched();

}  // namespace fsdp
