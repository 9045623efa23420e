#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "fsdp/device_mesh.h"
#include "fsdp/fully_shard.h"
#include "fsdp/memory_budget.h"
#include "fsdp/stats.h"

namespace fsdp {

/// How the ranks of a planned mesh communicate.
struct PlannedMeshOptions {
  /// How many consecutive ranks each host has, as torchrun numbers them. 0: all ranks are on one host.
  std::int64_t ranks_per_host = 0;
  /// On "cpu": MeshOptions::shared_memory, and FSDP_SHARED_MEMORY is not 0.
  bool shared_memory = true;
  std::int64_t rank = 0;  ///< The rank that is planned.
};

/// Returns a fake mesh for plan(), without starting ranks. It takes the arguments of init_device_mesh(), with all sizes set. `device_type`
/// is "cpu" (Gloo and shared memory) or "cuda" (NCCL); the device need not exist. A model that is sharded over the mesh has no memory. Its
/// collectives return at once and count bytes. Throws Error if a size is missing, a name is empty or repeated, or the device type is not
/// known.
DeviceMesh planned_device_mesh(const std::string& device_type, std::vector<MeshDim> dims, PlannedMeshOptions options = {});

/// This rank's bytes, by kind.
struct PlanBytes {
  std::int64_t main_parameters = 0;      ///< Shards (or replicas) that the optimizer updates.
  std::int64_t main_gradients = 0;       ///< Reduced gradients.
  std::int64_t optimizer_state = 0;      ///< The optimizer's state for each element.
  std::int64_t gathered_parameters = 0;  ///< Unsharded parameters of units, for computation.
  std::int64_t unreduced_gradients = 0;  ///< Gradients of units before their reduction.
  std::int64_t communication = 0;        ///< Receive staging of reductions, and other temporary memory of gathers and reductions.
  std::int64_t unused_slots = 0;         ///< Free memory in the slots, for later use.
  std::int64_t activations = 0;          ///< PlanOptions::activations of the units between their forward and their backward.
  std::int64_t host = 0;                 ///< Offloaded data in host memory.

  /// The sum of all of these, except for `host`.
  std::int64_t device() const {
    return main_parameters + main_gradients + optimizer_state + gathered_parameters + unreduced_gradients + communication + unused_slots +
           activations;
  }
  bool operator==(const PlanBytes&) const = default;
};

/// The bytes of one unit, each kind while it exists.
struct PlannedUnit {
  std::string name;                  ///< As in UnitInfo.
  std::int64_t elements = 0;         ///< Of its parameters.
  std::int64_t main_parameters = 0;  ///< This rank's.
  std::int64_t main_gradients = 0;   ///< This rank's.
  std::int64_t optimizer_state = 0;  ///< This rank's, without padding.
  std::int64_t gathered = 0;         ///< The unsharded parameters.
  std::int64_t unreduced = 0;        ///< The gradients before their reduction.
  std::int64_t communication = 0;    ///< Receive staging of its reduction.
  std::int64_t padding = 0;          ///< The part of `gathered` that belongs to no parameter.
  std::int64_t activations = 0;      ///< PlanOptions::activations.
  std::int64_t checkpoint = 0;       ///< What this rank writes of parameters and optimizer state into a checkpoint.
};

/// What this rank sends in one step over one dimension of a mesh.
struct PlannedLink {
  std::string dim;          ///< The dimension's name; with " (neighbours)" for the post-forward mesh.
  std::int64_t ranks = 1;   ///< How many ranks communicate.
  std::int64_t stride = 1;  ///< The difference between the global ranks of neighbours.
  WireStats sent;           ///< As wire_stats() counts it.
};

/// Something that a rank does in a step.
struct PlannedAction {
  /// What it does.
  enum class What : std::uint8_t {
    kCompute,  ///< Computes a part of `unit`: `share` of its forward or backward.
    kPost,     ///< Begins the collective `number`.
    kWait,     ///< Needs the result of the collective `number`.
    kUpdate,   ///< The optimizer updates.
  };
  What what = What::kCompute;  ///< The kind of action.
  bool in_backward = false;    ///< Otherwise in forward.
  std::size_t unit = 0;        ///< Index in Plan::units of the unit that is computed, gathered or reduced.
  double share = 1;            ///< For kCompute: the part of the unit's forward or backward.
  std::size_t number = 0;      ///< The number of the collective, from 0.
  std::size_t link = 0;        ///< Index in Plan::links.
  std::size_t queue = 0;       ///< Collectives with the same queue run one after the other.
  std::int64_t bytes = 0;      ///< The bytes that a rank sends.
};

/// A part of a step, such as the forward of a unit.
struct PlannedMoment {
  std::string what;  ///< As in Plan::moment.
  PlanBytes most;    ///< At the peak of the device's memory in this part.
};

/// The memory that FSDP2 (torch.distributed.fsdp.fully_shard) needs at its peak for the same model, mesh and options. It always gathers one
/// unit ahead in backward.
struct PlannedFSDP2 {
  PlanBytes peak;      ///< `communication` are the buffers of gathers and reductions; `gathered_parameters` are their copies.
  std::string moment;  ///< The moment of the peak: see Plan::moment.
};

/// The memory and the communication of a rank in one step, from the sixth step on. (The buffers of earlier steps are not planned yet.)
struct Plan {
  std::int64_t ranks = 1;     ///< The number of planned ranks.
  std::int64_t elements = 0;  ///< Of all parameters.
  /// As memory_stats() after such a step, if peaks were reset before it, on a device that ranks of this host do not share.
  MemoryStats memory;
  WireStats wire;      ///< As wire_stats(), for one step.
  PlanBytes peak;      ///< At the peak of the device's memory.
  std::string moment;  ///< The moment of the peak: "forward of 'blocks.3'", "backward of 'blocks.3'", "the end of backward", "the update".
  std::vector<PlannedUnit> units;      ///< In the order of the modules.
  std::vector<PlannedLink> links;      ///< One per dimension over which this rank communicates.
  std::vector<PlannedMoment> moments;  ///< The parts of a step, in their order.
  std::vector<PlannedAction> actions;  ///< The actions of a step, in their order, for simulate().
  /// Empty on one rank, and with options that FSDP2 lacks: placements other than optim_grads_params, HFSDP, offload of optimizer state
  /// alone, gather formats, kept units, and main gradients of another dtype than the main parameters. Also empty with
  /// reshard_after_forward = false, and with several microbatches.
  std::optional<PlannedFSDP2> fsdp2;

  /// True if a device with this much memory for the program can hold the peak. The plan does not include the memory that torch's allocator
  /// and the device's driver need in addition.
  bool fits(std::int64_t bytes) const { return peak.device() <= bytes; }
  /// Returns the host memory that AsyncSaver takes for this rank: its buffers for copies, and with AsyncSaverOptions::memory on so many
  /// hosts two steps, each with a copy of another rank's file if there are several hosts. 0: without. Buffers of the model, the program's
  /// own values and the heads of records are not counted.
  std::int64_t saver_memory(std::int64_t hosts) const;
  /// The plan as a table, to print.
  std::string text() const;
  /// The plan as a JSON object, in bytes.
  std::string json() const;
  /// A picture (SVG) of the memory over one step: a bar for each of `moments`, divided by kinds.
  std::string svg() const;
};

/// The table of text(), written to a stream.
std::ostream& operator<<(std::ostream& stream, const Plan& plan);

/// Plans training of `module`, sharded with these options. The engine runs a few steps without allocating memory or starting ranks, so a
/// plan and a run are the same to the byte. `options.mesh`, and the meshes of units, come from planned_device_mesh(). The module can be
/// deferred (deferred_init), on the meta device, or real. Its values are neither read nor changed. Takes milliseconds for any number of
/// ranks.
///
/// Not collective. Throws Error in the same cases as fully_shard; if the mesh is not a planned one; and if the order names a unit that does
/// not exist.
Plan plan(const torch::nn::Module& module, const FullyShardOptions& options, const PlanOptions& planned = {});

/// Returns the plan for the smallest number of ranks with which the peak fits into `bytes`, or nothing if none is found. `plan_for` is
/// called with numbers of ranks, all multiples of `step` (the ranks of a host, for example) up to `most`. More ranks need less memory,
/// except for padding. So bisection finds the first number that would fit without padding, and the next 64 are tried one by one; if none of
/// them fits, bisection continues from there, and assumes that padding is the same for all.
std::optional<Plan> smallest_world(const std::function<Plan(std::int64_t ranks)>& plan_for, std::int64_t bytes, std::int64_t step = 1,
                                   std::int64_t most = std::int64_t{1} << 17);

}  // namespace fsdp
