#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

// Finds this process's place among the ranks from its launcher's environment variables. It opens no file and no connection.
namespace fsdp::comm {

/// The value of an environment variable; nothing where it is not set or empty.
using Getenv = std::function<std::optional<std::string>(const char* name)>;

/// The Getenv that reads this process's environment.
std::optional<std::string> process_environment(const char* name);

/// launch_local's own variable for rank 0: the file descriptor of a socket that listens on MASTER_PORT already.
inline constexpr const char* kListenFd = "FSDP_MASTER_LISTEN_FD";

struct World {
  std::string launcher = "none";  ///< "torchrun", "Open MPI", "MPICH", "srun" or "none".
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;  ///< This process's number among the ranks of this machine.
  std::optional<int> local_size;
  std::string master_addr;  ///< Where rank 0 (or torchrun's agent) serves the store; empty for a world of one.
  std::uint16_t master_port = 0;
  bool agent_store = false;  ///< torchrun's agent serves the store: every rank is a client.
  int restart_count = 0;     ///< How often torchrun has restarted the ranks; the agent's store keeps the keys of earlier attempts.
  std::optional<int> listen_fd;

  /// True if all ranks are known to run on this machine.
  bool one_machine() const { return local_size == size || size == 1; }
};

/// Reads the variables of torchrun, Open MPI's and MPICH's (and Intel's) mpirun, and srun, in this order; a world of one without any.
/// Throws Error that names the variable if one is missing or malformed. docs/run/launch.md lists them.
World read_world(const Getenv& env);

/// True if torchrun's agent serves the store of its ranks, which then outlives them.
bool is_served_by_agent(const Getenv& env);

/// See fsdp::is_launched().
bool is_launched(const Getenv& env);

/// Returns which of the visible GPUs this rank uses. If the launcher shows each rank only its own GPU (SLURM's --gpus-per-task=1), this is
/// number 0, whatever the local rank. With `shared`, ranks beyond the last GPU begin again at the first. Throws Error if there is none.
int gpu_of(const World& world, int visible, bool shared);

/// The first host of SLURM's compressed list: "node03" of "node[03-05,9],other1".
std::string first_host(const std::string& nodelist);

}  // namespace fsdp::comm
