#include "comm/launch/world.h"

#include <charconv>
#include <cstdlib>

#include "base/stable_hash.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

/// The names of a launcher's variables for the same four facts.
struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

constexpr Launcher kTorchrun = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Launcher kOpenMpi = {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Launcher kMpich = {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};

std::int64_t parse(const char* name, const std::string& text, std::int64_t low, std::int64_t high) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < low || value > high) {
    throw Error(std::string("environment variable ") + name + " is '" + text + "'; expected a number from " + std::to_string(low) + " to " +
                std::to_string(high));
  }
  return value;
}

std::optional<std::int64_t> optional_number(const Getenv& env, const char* name, std::int64_t low, std::int64_t high) {
  const auto text = env(name);
  if (!text) return std::nullopt;
  return parse(name, *text, low, high);
}

std::int64_t number(const Getenv& env, const char* launcher, const char* name, std::int64_t low, std::int64_t high) {
  if (const auto value = optional_number(env, name, low, high)) return *value;
  throw Error(std::string("environment variable ") + name + " is not set, although this process was started by " + launcher +
              ". Start the program through the launcher, or unset the launcher's variables. See docs/run/launch.md.");
}

constexpr std::int64_t kMaxRanks = 1 << 24;
constexpr std::int64_t kAnyId = std::int64_t{1} << 62;

bool mentions(const Getenv& env, const Launcher& launcher) { return env(launcher.rank) || env(launcher.size); }

// srun sets SLURM_STEP_ID in the processes that it starts. A batch script has SLURM_PROCID and SLURM_NTASKS too, but is no rank.
bool is_srun_task(const Getenv& env) { return (env("SLURM_STEP_ID") || env("SLURM_STEPID")) && env("SLURM_PROCID"); }

void read_ranks(const Getenv& env, const Launcher& launcher, World& world) {
  world.launcher = launcher.name;
  world.size = static_cast<int>(number(env, launcher.name, launcher.size, 1, kMaxRanks));
  world.rank = static_cast<int>(number(env, launcher.name, launcher.rank, 0, world.size - 1));
  world.local_rank = optional_number(env, launcher.local_rank, 0, world.size - 1);
  world.local_size = optional_number(env, launcher.local_size, 1, world.size);
}

void read_srun_ranks(const Getenv& env, World& world) {
  // SLURM_NTASKS may be the job's count; SLURM_STEP_NUM_TASKS is this step's.
  const Launcher srun = {"srun", "SLURM_PROCID", env("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", "SLURM_LOCALID",
                         ""};
  read_ranks(env, srun, world);
  const char* nodes = env("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES";
  if (optional_number(env, nodes, 1, kMaxRanks) == 1) world.local_size = world.size;
}

std::optional<std::string> slurm_nodelist(const Getenv& env) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    if (auto list = env(name)) return list;
  }
  return std::nullopt;
}

// Ports below Linux's ephemeral range, so that no outgoing connection holds one by chance.
constexpr std::uint16_t kFirstPort = 15000;
constexpr std::uint64_t kPorts = 15000;

std::uint16_t derived_port(std::uint64_t seed) { return static_cast<std::uint16_t>(kFirstPort + seed % kPorts); }

// mpirun and srun name no meeting point. One is derived where all ranks see the same facts.
void read_meeting_point(const Getenv& env, World& world) {
  const auto addr = env("MASTER_ADDR");
  const auto port = optional_number(env, "MASTER_PORT", 1, 65535);
  const auto nodelist = slurm_nodelist(env);
  const auto job = optional_number(env, "SLURM_JOB_ID", 0, kAnyId);
  const auto mpi_job = env("PMIX_NAMESPACE");

  if (addr) {
    world.master_addr = *addr;
  } else if (world.launcher != "torchrun" && world.one_machine()) {
    world.master_addr = "127.0.0.1";
  } else if (world.launcher != "torchrun" && nodelist) {
    world.master_addr = first_host(*nodelist);
  } else {
    throw Error("environment variable MASTER_ADDR is not set: " + world.launcher + " started " + std::to_string(world.size) +
                " ranks that have to meet at rank 0's machine. Set it to that machine's name. See docs/run/launch.md.");
  }

  if (port) {
    world.master_port = static_cast<std::uint16_t>(*port);
  } else if (world.launcher != "torchrun" && job) {
    const auto step = optional_number(env, env("SLURM_STEP_ID") ? "SLURM_STEP_ID" : "SLURM_STEPID", 0, kAnyId).value_or(0);
    world.master_port = derived_port(static_cast<std::uint64_t>(*job + step));
  } else if (world.launcher == "Open MPI" && mpi_job) {
    world.master_port = derived_port(stable_hash(*mpi_job));
  } else {
    throw Error("environment variable MASTER_PORT is not set: " + world.launcher + " started " + std::to_string(world.size) +
                " ranks that have to meet. Set it to a free port of rank 0's machine, the same for all ranks. See docs/run/launch.md.");
  }
}

}  // namespace

std::optional<std::string> process_environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

World read_world(const Getenv& env) {
  World world;
  if (mentions(env, kTorchrun)) {
    read_ranks(env, kTorchrun, world);
  } else if (mentions(env, kOpenMpi)) {
    read_ranks(env, kOpenMpi, world);
  } else if (mentions(env, kMpich)) {
    read_ranks(env, kMpich, world);
    if (!world.local_rank && is_srun_task(env)) world.local_rank = optional_number(env, "SLURM_LOCALID", 0, world.size - 1);
  } else if (is_srun_task(env)) {
    read_srun_ranks(env, world);
  } else {
    world.local_rank = 0;
    world.local_size = 1;
    return world;
  }
  if (world.size == 1) return world;
  read_meeting_point(env, world);
  if (world.launcher == "torchrun") {
    world.agent_store = is_served_by_agent(env);
    world.restart_count = static_cast<int>(optional_number(env, "TORCHELASTIC_RESTART_COUNT", 0, 1 << 30).value_or(0));
    world.listen_fd = optional_number(env, kListenFd, 0, 1 << 30);
  }
  return world;
}

bool is_served_by_agent(const Getenv& env) {
  const auto agent = env("TORCHELASTIC_USE_AGENT_STORE");
  return agent == "True" || agent == "1";  // torchrun writes Python's True.
}

bool is_launched(const Getenv& env) {
  if (mentions(env, kTorchrun)) return true;
  const auto several = [&](const char* name) { return optional_number(env, name, 1, kMaxRanks).value_or(1) > 1; };
  if (mentions(env, kOpenMpi)) return several(kOpenMpi.size);
  if (mentions(env, kMpich)) return several(kMpich.size);
  return is_srun_task(env) && several(env("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS");
}

int gpu_of(const World& world, int visible, bool shared) {
  const std::string rank = "rank " + std::to_string(world.rank);
  if (visible == 0) throw Error(rank + " sees no GPU; check the driver and CUDA_VISIBLE_DEVICES");
  if (visible == 1) return 0;
  if (!world.local_rank) {
    throw Error("LOCAL_RANK is not set: " + rank + " can't tell which of the " + std::to_string(visible) + " visible GPUs is its own");
  }
  if (shared) return *world.local_rank % visible;
  if (*world.local_rank >= visible) {
    throw Error(rank + " is the machine's local rank " + std::to_string(*world.local_rank) + ", but only " + std::to_string(visible) +
                " GPUs are visible; start one rank per GPU, or let ranks share them: MeshOptions::share_gpus");
  }
  return *world.local_rank;
}

std::string first_host(const std::string& nodelist) {
  // The list's grammar: hosts by comma; inside a host, brackets hold numbers and ranges by comma, zero-padded as they are to be
  // written; more than one bracket may follow ("rack[1-2]node[3,4]").
  std::string host;
  for (std::size_t i = 0; i < nodelist.size() && nodelist[i] != ','; ++i) {
    if (nodelist[i] != '[') {
      host += nodelist[i];
      continue;
    }
    const std::size_t close = nodelist.find(']', i);
    const std::size_t end = nodelist.find_first_of(",-]", i + 1);
    if (close == std::string::npos || end == i + 1) {
      throw Error("can't read the node list '" + nodelist + "' of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST; set MASTER_ADDR instead");
    }
    host += nodelist.substr(i + 1, end - i - 1);
    i = close;
  }
  if (host.empty()) {
    throw Error("the node list '" + nodelist + "' of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST names no host; set MASTER_ADDR instead");
  }
  return host;
}

}  // namespace fsdp::comm
