#include "fsdp/plan.h"

#include <cmath>
#include <functional>
#include <utility>

#include "comm/mesh/null_mesh.h"
#include "comm/traffic.h"
#include "fsdp/error.h"
#include "plan/planned_model.h"

namespace fsdp {
namespace {

/// How many ranks of a row are on each of its hosts, as comm::ranks_per_host counts them.
int ranks_per_host(int size, std::int64_t stride, std::int64_t on_host) {
  if (on_host == 0 || size * stride <= on_host) return size;
  if (stride >= on_host || on_host % stride != 0) return 1;
  const auto ranks = static_cast<int>(on_host / stride);
  return size % ranks == 0 ? ranks : 1;
}

comm::Traffic traffic_of(c10::DeviceType type, int size, int on_host, bool shared_memory) {
  if (type != c10::kCPU) return comm::Traffic::by_backend(size, on_host);
  return shared_memory && on_host > 1 ? comm::Traffic::by_shared_memory(size, on_host) : comm::Traffic::by_messages(size);
}

/// At least the bytes of the peak that are padding. Each kind of a unit's memory is padded as much as its unsharded parameters.
std::int64_t padding_of(const Plan& plan) {
  double padding = 0;
  for (const auto& unit : plan.units) {
    if (unit.gathered == 0) continue;
    const auto all =
        unit.main_parameters + unit.main_gradients + unit.optimizer_state + unit.gathered + unit.unreduced + unit.communication;
    padding += static_cast<double>(unit.padding) / static_cast<double>(unit.gathered) * static_cast<double>(all);
  }
  return static_cast<std::int64_t>(std::ceil(padding));
}

}  // namespace

std::int64_t Plan::saver_memory(std::int64_t hosts) const {
  std::int64_t checkpoint = 0;
  for (const auto& unit : units) checkpoint += unit.checkpoint;
  if (hosts == 0) return checkpoint;
  // A buffer for the disk and one for the memory.
  return checkpoint * (2 + 2 * (hosts > 1 ? 2 : 1));
}

DeviceMesh planned_device_mesh(const std::string& device_type, std::vector<MeshDim> dims, PlannedMeshOptions options) {
  if (device_type != "cpu" && device_type != "cuda") {
    throw Error("planned_device_mesh: device type '" + device_type + "' is not known; use \"cpu\" (Gloo) or \"cuda\" (NCCL)");
  }
  if (options.ranks_per_host < 0) throw Error("planned_device_mesh: ranks_per_host " + std::to_string(options.ranks_per_host));
  std::int64_t ranks = 1;
  for (const auto& dim : dims) {
    if (dim.size < 1) {
      throw Error("planned_device_mesh: dimension '" + dim.name + "' has " + std::to_string(dim.size) + " ranks; give 1 or more");
    }
    ranks *= dim.size;
  }
  if (options.rank < 0 || options.rank >= ranks) {
    throw Error("planned_device_mesh: there is no rank " + std::to_string(options.rank) + " of " + std::to_string(ranks));
  }
  const auto type = device_type == "cpu" ? c10::kCPU : c10::kCUDA;
  return comm::make_null_mesh({.dims = std::move(dims),
                               .rank = options.rank,
                               .device = c10::Device(c10::kMeta),
                               .stands_for = type,
                               .traffic = [type, options](int size, std::int64_t stride) {
                                 const int on_host = ranks_per_host(size, stride, options.ranks_per_host);
                                 return traffic_of(type, size, on_host, options.shared_memory);
                               }});
}

Plan plan(const torch::nn::Module& module, const FullyShardOptions& options, const PlanOptions& planned) {
  return planning::PlannedModel(module, options, planned).plan();
}

std::optional<Plan> smallest_world(const std::function<Plan(std::int64_t ranks)>& plan_for, std::int64_t bytes, std::int64_t step,
                                   std::int64_t most) {
  if (step < 1) throw Error("smallest_world(): step " + std::to_string(step) + "; give the ranks of a host, or 1");
  constexpr int kNeighbours = 64;
  const auto most_steps = most / step;
  /// The first number of steps after `fails` with which `holds`, if that is so for all larger ones, too.
  const auto first_after = [&](std::int64_t fails, const std::function<bool(const Plan&)>& holds) {
    std::optional<std::pair<std::int64_t, Plan>> found;
    for (std::int64_t ahead = 1; !found; ahead *= 2) {
      if (fails >= most_steps) return found;
      const auto next = std::min(fails + ahead, most_steps);
      auto plan = plan_for(next * step);
      if (holds(plan)) {
        found.emplace(next, std::move(plan));
      } else {
        fails = next;
      }
    }
    while (found->first - fails > 1) {
      const auto middle = fails + (found->first - fails) / 2;
      auto plan = plan_for(middle * step);
      if (holds(plan)) {
        found.emplace(middle, std::move(plan));
      } else {
        fails = middle;
      }
    }
    return found;
  };
  // Padding apart, more ranks never need more. So no smaller world fits than the first that would without padding.
  auto found = first_after(0, [&](const Plan& plan) { return plan.peak.device() - padding_of(plan) <= bytes; });
  for (int k = 0; k < kNeighbours && found; ++k) {
    if (found->second.fits(bytes)) return found->second;
    if (found->first == most_steps) return std::nullopt;
    const auto next = found->first + 1;
    found.emplace(next, plan_for(next * step));
  }
  if (!found) return std::nullopt;
  found = first_after(found->first - 1, [&](const Plan& plan) { return plan.fits(bytes); });
  if (!found) return std::nullopt;
  return found->second;
}

}  // namespace fsdp
