#pragma once

#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"

namespace fsdp::testing {

/// One way to shard a model.
struct Sharding {
  std::string name;
  FullyShardOptions options;
  at::ScalarType compute = at::kFloat;  ///< Of the trainable parameters, once sharded.
};

/// Placements, meshes and precisions that differ in where main parameters are and what is gathered, over all ranks. `own_mesh` names a unit
/// that in some of them is sharded over fewer ranks than the others. Collective.
inline std::vector<Sharding> shardings(const UnitPredicate& units, const std::string& own_mesh) {
  const auto all = init_device_mesh("cpu", {{"dp_shard", -1}});
  const auto rows = init_device_mesh("cpu", {{"dp_outer", all.size() > 1 ? 2 : 1}, {"dp_shard", -1}});
  const MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16};
  std::vector<Sharding> shardings;
  const auto add = [&](std::string name, const DeviceMesh& mesh, Placements placements) -> Sharding& {
    return shardings.emplace_back(
        Sharding{.name = std::move(name), .options = {.mesh = mesh, .units = units, .placements = placements}, .compute = at::kFloat});
  };
  const auto as_bf16 = [&](Sharding sharding) {
    sharding.name += ", bf16";
    sharding.options.mixed_precision = bf16;
    sharding.compute = at::kBFloat16;
    shardings.push_back(std::move(sharding));
  };
  for (const auto* strategy : {"no_shard", "optim", "optim_grads", "optim_grads_params"}) {
    as_bf16(add(strategy, all, Placements::from_name(strategy)));
    as_bf16(add(std::string("HSDP of ") + strategy, rows, Placements::from_name(strategy)));
  }
  auto& hfsdp = add("HFSDP", rows, Placements::optim_grads_params());
  hfsdp.options.outer_placements = Placements::optim();
  as_bf16(hfsdp);
  auto& own = add("a mesh of its own", rows, Placements::optim_grads_params());
  own.options.unit_settings = [rows, own_mesh](const std::string& name, const torch::nn::Module&) {
    return UnitSettings{.mesh = name == own_mesh ? rows["dp_shard"] : DeviceMesh()};
  };
  as_bf16(own);
  const auto eight_bits = std::make_shared<const GatherFormat>(float8_blocks());
  for (const auto& outer : {Placements::no_shard(), Placements::optim()}) {
    auto& gathered = add(outer == Placements::optim() ? "HFSDP, 8 bits" : "HSDP, 8 bits", rows, Placements::optim_grads_params());
    gathered.options.outer_placements = outer;
    gathered.options.gather_format = [eight_bits](const std::string&, const at::Tensor&) { return eight_bits; };
  }
  const auto differences = std::make_shared<const GatherFormat>(int4_differences({.block = 32}));
  for (const auto* strategy : {"optim", "optim_grads"}) {
    auto& gathered = add(std::string("HSDP of ") + strategy + ", differences", rows, Placements::from_name(strategy));
    gathered.options.gather_format = [differences](const std::string&, const at::Tensor&) { return differences; };
    as_bf16(gathered);
  }
  for (const auto* strategy : {"no_shard", "optim", "optim_grads_params"}) {
    auto& offloaded = add(std::string("offloaded ") + strategy, rows, Placements::from_name(strategy));
    offloaded.options.offload = Offload::kAll;
    as_bf16(offloaded);
  }
  auto& offloaded = add("offloaded HFSDP", rows, Placements::optim_grads_params());
  offloaded.options.outer_placements = Placements::optim();
  offloaded.options.offload = Offload::kAll;
  return shardings;
}

}  // namespace fsdp::testing
