#include "comm/mesh/rendezvous.h"

#include <fcntl.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "base/exception_text.h"
#include "base/process.h"
#include "comm/launch/endings.h"

namespace fsdp::comm {
namespace {

constexpr const char* kProgress = "progress";  // the part of the store for it

std::string meeting_point(const World& world) { return world.master_addr + ":" + std::to_string(world.master_port); }

c10::intrusive_ptr<c10d::Store> connect_store(const World& world, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = world.master_port;
  options.isServer = world.rank == 0 && !world.agent_store;
  options.numWorkers = static_cast<std::size_t>(world.size);
  options.waitWorkers = !world.agent_store;  // The agent's count is of agents, not of ranks.
  options.timeout = timeout;
  if (options.isServer && world.listen_fd) {
    options.masterListenFd = world.listen_fd;
    fcntl(*world.listen_fd, F_SETFD, FD_CLOEXEC);  // Programs that this rank starts have no use for it.
  }
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(world.master_addr, options);
    return c10::make_intrusive<c10d::PrefixStore>("fsdp/attempt_" + std::to_string(world.restart_count), std::move(store));
  } catch (...) {
    throw CommError("rank " + std::to_string(world.rank) + " of " + std::to_string(world.size) + " could not meet the others at " +
                    meeting_point(world) + " (" + world.launcher + "): " + current_exception_text() +
                    ". Check that all ranks started, that MASTER_ADDR names rank 0's machine and that MASTER_PORT is free there.");
  }
}

void prepare_for_sockets() {
  prepare_process();
  // Gloo and the store write to sockets without MSG_NOSIGNAL: where a peer has died, that would end this process without a word, instead
  // of failing the collective with the peer's name. Python programs ignore the signal from the start.
  ignore_signal(SIGPIPE);
}

/// The store of launchers' ranks. A forked process is no rank of them, and would use its parent's connection.
struct WorldStore {
  std::mutex mutex;  // Two threads may make their process's first meshes at once.
  c10::intrusive_ptr<c10d::Store> store;
};

// One store serves all meshes of the process: its server can't be closed and opened again while other ranks still use it. It is never
// destroyed, since its thread can't be joined safely among the destructors of static objects.
c10::intrusive_ptr<c10d::Store> world_store(const World& world, std::chrono::milliseconds timeout) {
  auto& [mutex, store] = of_this_process<WorldStore>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (!store) {
    prepare_for_sockets();
    store = connect_store(world, timeout);
    if (world.agent_store) tell_endings_by(store, world.rank);
  }
  return store;
}

bool is_loopback(const std::string& host) { return host == "localhost" || host.starts_with("127.") || host == "::1"; }

World world_of(std::int64_t rank, std::int64_t size) {
  World world;
  world.rank = static_cast<int>(rank);
  world.size = static_cast<int>(size);
  world.master_addr = process_environment("MASTER_ADDR").value_or("");
  return world;
}

std::shared_ptr<gloo::transport::Device> make_gloo_device(const World& world) {
  using Gloo = c10d::ProcessGroupGloo;
  if (is_loopback(world.master_addr)) return Gloo::createDeviceForHostname("127.0.0.1");
  // If several interfaces are named, the first one is used, because alarms arrive before a connection closes only if each pair of ranks has
  // a single connection.
  if (const auto interfaces = process_environment("GLOO_SOCKET_IFNAME")) {
    return Gloo::createDeviceForInterface(interfaces->substr(0, interfaces->find(',')));
  }
  // A host name that resolves to no address of this machine is common in containers, and needless where no rank is elsewhere.
  if (world.one_machine()) return Gloo::createDeviceForHostname("127.0.0.1");
  return Gloo::createDefaultDevice();
}

#ifdef USE_C10D_NCCL
c10::intrusive_ptr<c10d::Backend> make_nccl_group(const DeviceGroupOptions& group) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = watchdog_timeout(group.timeout);
  options->group_name = group.name;  // For NCCL's logs and flight records, as the next one.
  options->global_ranks_in_group.assign(group.row.global_ranks.begin(), group.row.global_ranks.end());
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(group.store, group.row.rank, group.row.size(), options);
  backend->setBoundDeviceId(group.device);
  return backend;
}
#endif

/// Before meshes are made, by one thread.
std::map<c10::DeviceType, MakeDeviceGroup>& device_groups() {
  static std::map<c10::DeviceType, MakeDeviceGroup> known = {
#ifdef USE_C10D_NCCL
      {c10::kCUDA, &make_nccl_group},
#endif
  };
  return known;
}

}  // namespace

std::chrono::milliseconds watchdog_timeout(std::chrono::milliseconds timeout) {
  return timeout + std::max(timeout / 10, std::chrono::milliseconds(10'000));
}

Rendezvous::Rendezvous(const World& world, std::string prefix, std::chrono::milliseconds timeout) : world_(world), timeout_(timeout) {
  if (world.size == 1) return;
  common_ = world_store(world, timeout);
  store_ = c10::make_intrusive<c10d::PrefixStore>(std::move(prefix), common_);
  progress_ = WaitNotice::progress_by(store(kProgress), world.rank);
  gloo_device_ = make_gloo_device(world);
}

Rendezvous::Rendezvous(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank, std::int64_t world_size, std::string prefix,
                       std::chrono::milliseconds timeout)
    : world_(world_of(rank, world_size)), timeout_(timeout) {
  if (world_size == 1) return;
  prepare_for_sockets();
  if (is_served_by_agent(process_environment)) tell_endings_by(store, rank);
  common_ = std::move(store);
  store_ = c10::make_intrusive<c10d::PrefixStore>(std::move(prefix), common_);
  progress_ = WaitNotice::progress_by(this->store(kProgress), rank);
  gloo_device_ = make_gloo_device(world_);
}

template <typename Make>
c10::intrusive_ptr<c10d::Backend> Rendezvous::group(const Row& row, const c10::intrusive_ptr<c10d::Store>& store, const Make& make) {
  if (row.size() == 1) return {};
  try {
    return make(store);
  } catch (...) {
    throw CommError(
        "rank " + std::to_string(world_.rank) + " of " + std::to_string(world_.size) +
        " could not connect to its peers of mesh dimension '" + row.dim + "': " + current_exception_text() +
        ". Check that all ranks make the same mesh; with several network interfaces, set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME).");
  }
}

c10::intrusive_ptr<c10d::Store> Rendezvous::store(const std::string& name) const {
  if (store_ == nullptr) return {};
  return c10::make_intrusive<c10d::PrefixStore>(name, store_);
}

c10::intrusive_ptr<c10d::Backend> Rendezvous::make_gloo(const Row& row, const c10::intrusive_ptr<c10d::Store>& store) {
  return group(row, store, [&](const c10::intrusive_ptr<c10d::Store>& of_group) {
    auto options = c10d::ProcessGroupGloo::Options::create(timeout_);
    options->devices.push_back(gloo_device_);
    return c10::make_intrusive<c10d::ProcessGroupGloo>(of_group, row.rank, row.size(), options);
  });
}

c10::intrusive_ptr<c10d::Backend> Rendezvous::gloo_group(const Row& row, const std::string& name) { return make_gloo(row, store(name)); }

c10::intrusive_ptr<c10d::Backend> Rendezvous::gloo_group_across(const Row& row, const std::string& name) {
  if (common_ == nullptr) return {};
  return make_gloo(row, c10::make_intrusive<c10d::PrefixStore>("libfsdp/across meshes/" + name, common_));
}

c10::intrusive_ptr<c10d::Backend> Rendezvous::device_group(const Row& row, const std::string& name, c10::Device device) {
  return group(row, store(name), [&](const c10::intrusive_ptr<c10d::Store>& of_group) {
    return device_groups().at(device.type())({.store = of_group, .row = row, .name = name, .device = device, .timeout = timeout_});
  });
}

void register_device_groups(c10::DeviceType type, MakeDeviceGroup make) { device_groups()[type] = std::move(make); }

std::optional<c10::DeviceType> device_type_of(const std::string& name) {
  for (const auto& [type, make] : device_groups()) {
    if (c10::DeviceTypeName(type, /*lower_case=*/true) == name) return type;
  }
  return {};
}

}  // namespace fsdp::comm
