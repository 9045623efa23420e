#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp {

namespace comm {
class Communicator;
}

/// One named dimension of a mesh. A size of -1 (in at most one dimension) is inferred from the number of ranks.
struct MeshDim {
  std::string name;        ///< Unique in a mesh.
  std::int64_t size = -1;  ///< In ranks.
};

/// How the ranks of a mesh exchange data.
struct MeshOptions {
  /// How long a collective may wait for another rank before it fails with CommError.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);

  /// On CPU meshes, ranks of one host read each other's memory instead of sending messages, if all ranks of a process group support it and
  /// have set this option. If a process group spans several hosts, each host must have the same number of its ranks, with consecutive
  /// numbers. The environment variable FSDP_SHARED_MEMORY=0 turns it off, too.
  bool shared_memory = true;

  /// On CUDA meshes: if a machine has more ranks than GPUs, ranks share GPUs in turn. NCCL refuses two ranks on one GPU unless its version
  /// and its settings allow it.
  bool share_gpus = false;
};

/// Ranks arranged in an n-dimensional grid (the last dimension varies fastest). The ranks that differ in one dimension only, a row, have a
/// communicator. A cheap handle: copies share the process groups, which are released with the last copy. (Modelled on torch's DeviceMesh.)
class DeviceMesh {
 public:
  DeviceMesh() = default;  ///< An undefined mesh; `defined()` is false.

  bool defined() const { return state_ != nullptr; }      ///< False for `DeviceMesh()`.
  c10::Device device() const;                             ///< This rank's device; meta if the mesh is planned (fsdp/plan.h).
  c10::DeviceType device_type() const;                    ///< Of this rank's device; of a planned mesh, the planned device type.
  const std::vector<MeshDim>& dims() const;               ///< Names and sizes, outermost first.
  std::int64_t rank() const;                              ///< This rank's global rank.
  std::int64_t size() const;                              ///< Ranks in this (sub-)mesh.
  std::int64_t size(const std::string& dim) const;        ///< Throws Error if there is no such dimension.
  std::int64_t coordinate(const std::string& dim) const;  ///< This rank's position along `dim`.
  DeviceMesh operator[](const std::string& dim) const;    ///< The 1-D sub-mesh through this rank.

  /// The sub-mesh of the given dimensions through this rank. Throws Error unless they are dimensions of this mesh, in the same order.
  DeviceMesh sub(const std::vector<std::string>& dims) const;

  /// The communicator of this rank's row along `dim`.
  std::shared_ptr<comm::Communicator> communicator(const std::string& dim) const;

  /// Another communicator of the same row, or of the `neighbours` ranks of it around this one (row positions k * neighbours and up), with
  /// process groups of its own. Collective over the row. Throws Error if `neighbours` does not divide the row; CommError if the rendezvous
  /// fails.
  std::shared_ptr<comm::Communicator> new_communicator(const std::string& dim, std::int64_t neighbours = 0) const;

  /// Makes a communicator by new_communicator() at the first call with this `neighbours`, and returns the same one at all later calls: on a
  /// GPU, each set of process groups takes seconds and hundreds of MB.
  std::shared_ptr<comm::Communicator> second_communicator(const std::string& dim, std::int64_t neighbours = 0) const;

  /// The sum of a host value over the ranks of the mesh, the same on every rank. It is added in the order of the ranks, whatever the mesh's
  /// dimensions are. Collective; blocks. Throws CommError.
  double sum(double value) const;

  /// True on every rank if `ok` is true on all ranks of the mesh, over all of its dimensions; false on every rank otherwise. Use it for
  /// decisions that all ranks must take alike, such as skipping a batch that one of them can't use. Collective; blocks. Throws CommError.
  bool all(bool ok) const;

  /// Blocks until every rank of the mesh has arrived. Throws CommError.
  void barrier() const;

  struct State;
  /// For the library's own use.
  explicit DeviceMesh(std::shared_ptr<State> state) : state_(std::move(state)) {}
  /// For the library's own use; null if undefined.
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

/// Connects the ranks that torchrun, mpirun, srun or launch_local started (docs/run/launch.md lists the variables that are read) and
/// arranges them in a mesh. Without any such variable, this process is the only rank. `device_type` is "cpu" (Gloo) or "cuda" (NCCL, on the
/// device LOCAL_RANK, or the only visible one). Collective over all ranks. Throws Error if the sizes do not multiply to the world size, a
/// name is empty or repeated, or the device type has no backend in this build; CommError if the rendezvous fails.
DeviceMesh init_device_mesh(const std::string& device_type, std::vector<MeshDim> dims, MeshOptions options = {});

/// A mesh of any size as one of its ranks sees it. Its collectives move no data and return at once, and no other process is needed. It is
/// meant for tests and for measuring host time.
DeviceMesh null_device_mesh(std::vector<MeshDim> dims, std::int64_t rank = 0);

}  // namespace fsdp
