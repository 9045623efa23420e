#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/collectives/group_communicator.h"
#include "comm/launch/world.h"

namespace gloo::transport {
class Device;
}

// How the ranks of a world find each other and form groups.
namespace fsdp::comm {

/// Makes the groups of one mesh. All ranks make the same groups in the same order; `prefix` keeps their keys in the store apart from those
/// of other meshes. Throws CommError if the rendezvous fails.
class Rendezvous {
 public:
  Rendezvous(const World& world, std::string prefix, std::chrono::milliseconds timeout);
  /// `store` is shared by all ranks.
  Rendezvous(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank, std::int64_t world_size, std::string prefix,
             std::chrono::milliseconds timeout);

  /// The part of the store under a name; null for a world of one rank.
  c10::intrusive_ptr<c10d::Store> store(const std::string& name) const;
  /// Exchanges the activities of the ranks of this mesh; may be null.
  const std::shared_ptr<StoreProgress>& progress() const { return progress_; }
  /// The group of a row; `name` is equal on its ranks and differs between groups of the mesh.
  c10::intrusive_ptr<c10d::Backend> gloo_group(const Row& row, const std::string& name);
  /// The group of ranks of several meshes. `name` differs between all groups that are made in this way.
  c10::intrusive_ptr<c10d::Backend> gloo_group_across(const Row& row, const std::string& name);
  /// As gloo_group(), with the backend that moves tensors of this device; see register_device_groups().
  c10::intrusive_ptr<c10d::Backend> device_group(const Row& row, const std::string& name, c10::Device device);

 private:
  template <typename Make>
  c10::intrusive_ptr<c10d::Backend> group(const Row& row, const c10::intrusive_ptr<c10d::Store>& store, const Make& make);
  c10::intrusive_ptr<c10d::Backend> make_gloo(const Row& row, const c10::intrusive_ptr<c10d::Store>& store);

  const World world_;
  const std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> common_;  // Of all meshes; null for a world of one rank.
  c10::intrusive_ptr<c10d::Store> store_;   // Of this one.
  std::shared_ptr<StoreProgress> progress_;
  std::shared_ptr<gloo::transport::Device> gloo_device_;  // One for all groups: each has a thread.
};

/// The time-out of a group whose collectives the host does not wait for, and whose watchdog ends the process (NCCL's). It is longer than
/// the time-out of messages, `timeout`, so that a rank which waits for a message fails first and can name the missing peer.
std::chrono::milliseconds watchdog_timeout(std::chrono::milliseconds timeout);

/// A row's group for one device; `name` is for logs.
struct DeviceGroupOptions {
  c10::intrusive_ptr<c10d::Store> store;
  const Row& row;
  std::string name;
  c10::Device device;
  std::chrono::milliseconds timeout;
};
using MakeDeviceGroup = std::function<c10::intrusive_ptr<c10d::Backend>(const DeviceGroupOptions& options)>;

/// Registers the backend that moves tensors of this type of device. Its collectives make streams wait, not the host. A build with NCCL
/// registers one for CUDA.
void register_device_groups(c10::DeviceType type, MakeDeviceGroup make);
/// The type of device of this name ("cuda"), if a backend for it is registered.
std::optional<c10::DeviceType> device_type_of(const std::string& name);

}  // namespace fsdp::comm
