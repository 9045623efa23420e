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

/// Returns a mesh that need not exist, for plan(): the same arguments as init_device_mesh(), with all sizes given. `device_type` is "cpu"
/// (Gloo and shared memory) or "cuda" (NCCL); neither has to be there. A model that is sharded over it has no memory. Its collectives
/// return at once and count bytes. Throws Error if a size is missing, a name is empty or repeated, or the device type is not known.
DeviceMesh planned_device_mesh(const std::string& device_type, std::vector<MeshDim> dims, PlannedMeshOptions options = {});

/// This rank's bytes, by what they are for.
struct PlanBytes {
  std::int64_t main_parameters = 0;      ///< Shards (or replicas) that the optimizer updates.
  std::int64_t main_gradients = 0;       ///< Reduced gradients.
  std::int64_t optimizer_state = 0;      ///< What the optimizer keeps per element.
  std::int64_t gathered_parameters = 0;  ///< Whole units, present for computation.
  std::int64_t unreduced_gradients = 0;  ///< Whole units' gradients before reduction.
  std::int64_t communication = 0;        ///< Receive staging of reductions, and what gathers and reductions need beside their buffers.
  std::int64_t unused_slots = 0;         ///< What the slots' blocks have beyond what is lent, for later use.
  std::int64_t activations = 0;          ///< PlanOptions::activations of the units between their forward and their backward.
  std::int64_t host = 0;                 ///< Offloaded data in host memory.

  /// The sum of all of these, except for `host`.
  std::int64_t device() const {
    return main_parameters + main_gradients + optimizer_state + gathered_parameters + unreduced_gradients + communication + unused_slots +
           activations;
  }
  bool operator==(const PlanBytes&) const = default;
};

/// The bytes of one unit, each while it is there.
struct PlannedUnit {
  std::string name;                  ///< As in UnitInfo.
  std::int64_t elements = 0;         ///< Of its parameters.
  std::int64_t main_parameters = 0;  ///< This rank's.
  std::int64_t main_gradients = 0;   ///< This rank's.
  std::int64_t optimizer_state = 0;  ///< This rank's, without padding.
  std::int64_t gathered = 0;         ///< The whole parameters.
  std::int64_t unreduced = 0;        ///< The whole gradients before reduction.
  std::int64_t communication = 0;    ///< Receive staging of its reduction.
  std::int64_t padding = 0;          ///< The part of `gathered` that belongs to no parameter.
  std::int64_t activations = 0;      ///< PlanOptions::activations.
};

/// What this rank sends in one step over one dimension of a mesh.
struct PlannedLink {
  std::string dim;          ///< The dimension's name; with " (neighbours)" for those that keep a copy after forward.
  std::int64_t ranks = 1;   ///< That communicate.
  std::int64_t stride = 1;  ///< How far apart the global ranks of neighbours are.
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
  What what = What::kCompute;  ///< See there.
  bool in_backward = false;    ///< Otherwise in forward.
  std::size_t unit = 0;        ///< Its place in Plan::units; of a collective, whose parameters or gradients it moves.
  double share = 1;            ///< Of kCompute.
  std::size_t number = 0;      ///< Of a collective, from 0.
  std::size_t link = 0;        ///< Its place in Plan::links.
  std::size_t queue = 0;       ///< Collectives with the same number here follow each other.
  std::int64_t bytes = 0;      ///< What a rank sends for it.
};

/// A part of a step, such as the forward of a unit.
struct PlannedMoment {
  std::string what;  ///< As in Plan::moment.
  PlanBytes most;    ///< When the device has to have most in it.
};

/// What FSDP2 (torch.distributed.fsdp.fully_shard) needs at its peak for the same model, mesh and options. It always gathers one unit ahead
/// in backward.
struct PlannedFSDP2 {
  PlanBytes peak;      ///< `communication` are the buffers of gathers and reductions; `gathered_parameters` are their copies.
  std::string moment;  ///< When that is: see Plan::moment.
};

/// What a rank needs and sends in one step, once steps have become alike (from the sixth on).
struct Plan {
  std::int64_t ranks = 1;     ///< Of the planned world.
  std::int64_t elements = 0;  ///< Of all parameters.
  /// What memory_stats() says after such a step, if peaks were reset before it. On a device that ranks of this host do not share.
  MemoryStats memory;
  WireStats wire;      ///< What wire_stats() adds up in such a step.
  PlanBytes peak;      ///< At the moment at which the device has to have most.
  std::string moment;  ///< When that is: "forward of 'blocks.3'", "backward of 'blocks.3'", "the end of backward", "the update".
  std::vector<PlannedUnit> units;      ///< In the order of the modules.
  std::vector<PlannedLink> links;      ///< One per dimension over which this rank communicates.
  std::vector<PlannedMoment> moments;  ///< The parts of a step, in their order.
  std::vector<PlannedAction> actions;  ///< What a step does, in its order. simulate() gives it a time.
  /// None on one rank, and with options that FSDP2 lacks: placements other than optim_grads_params, HFSDP, offload of optimizer state
  /// alone, gather formats, kept units, and main gradients of another dtype than the main parameters. Nor with reshard_after_forward
  /// false, or several microbatches.
  std::optional<PlannedFSDP2> fsdp2;

  /// True if a device with this much memory for the program can hold the peak. What torch's allocator and the device's driver need beside
  /// it is not in the plan.
  bool fits(std::int64_t bytes) const { return peak.device() <= bytes; }
  /// The plan as a table for people.
  std::string text() const;
  /// The same as a JSON object, in bytes.
  std::string json() const;
  /// A picture (SVG) of the memory over one step: a bar for each of `moments`, divided by kinds.
  std::string svg() const;
};

/// The table of text(), written to a stream.
std::ostream& operator<<(std::ostream& stream, const Plan& plan);

/// Plans training of `module`, sharded with these options: the engine itself runs steps of it over memory that has sizes and no bytes, so a
/// plan and a run are the same to the byte. `options.mesh`, and the meshes of units, come from planned_device_mesh(). The module can be
/// deferred (deferred_init), on the meta device, or real. It is not changed, and no value of it is read. Takes milliseconds, whatever the
/// number of ranks.
///
/// Not collective. Throws Error for what fully_shard would throw it for; if the mesh is not a planned one; and if the order names a unit
/// that is not there.
Plan plan(const torch::nn::Module& module, const FullyShardOptions& options, const PlanOptions& planned = {});

/// Returns the plan for the smallest world whose device holds the peak in `bytes`: `plan_for` is called with numbers of ranks, all
/// multiples of `step` (the ranks of a host, for example) up to `most`. None if none is found. More ranks need less memory, but for
/// padding. So bisection finds the first world that would fit without padding, and the next 64 are tried one by one; if none of them fits,
/// bisection goes on from there, and takes padding to be alike in all.
std::optional<Plan> smallest_world(const std::function<Plan(std::int64_t ranks)>& plan_for, std::int64_t bytes, std::int64_t step = 1,
                                   std::int64_t most = std::int64_t{1} << 17);

}  // namespace fsdp
