#include "fsdp/unit_info.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/text.h"
#include "comm/communicator.h"
#include "engine/engine.h"
#include "fsdp/fsdp_module.h"

namespace fsdp {
namespace {

/// The dimension along which a communicator of the model's mesh runs; without a name if it is none.
MeshDim dim_of(const engine::Engine& engine, const std::shared_ptr<comm::Communicator>& communicator) {
  for (const auto& dim : engine.options().mesh.dims()) {
    if (engine.options().mesh.communicator(dim.name) == communicator) return dim;
  }
  return {.name = "", .size = communicator->size()};
}

UnitInfo info_of(const engine::Engine& engine, const engine::Unit& unit) {
  UnitInfo info{.name = unit.name,
                .parameters = {},
                .whole_bytes = 0,
                .shard_bytes = 0,
                .dtypes = {},
                .reshard_after_forward = unit.options.reshards_after_forward(),
                .mesh = {}};
  std::vector<std::pair<std::size_t, std::string>> names;
  for (const auto& parameter : unit.parameters) names.emplace_back(parameter.position, parameter.name);
  std::sort(names.begin(), names.end());
  for (auto& [position, name] : names) info.parameters.push_back(std::move(name));
  const auto& parts = unit.layout.sub_buffers();
  for (std::size_t k = 0; k < parts.size(); ++k) {
    const auto& format = unit.formats[k];
    info.whole_bytes += parts[k].shard_numel * unit.layout.world_size() * static_cast<std::int64_t>(c10::elementSize(format.compute));
    info.shard_bytes += static_cast<std::int64_t>(unit.main.parts[k].nbytes());
    const UnitDtypes dtypes{.param = format.compute,
                            .main_param = format.main,
                            .main_grad = format.main_gradient,
                            .grad_comm = format.wire_gradient,
                            .gather_format = format.gather != nullptr};
    if (std::find(info.dtypes.begin(), info.dtypes.end(), dtypes) == info.dtypes.end()) info.dtypes.push_back(dtypes);
  }
  if (unit.communicators.outer) info.mesh.push_back(dim_of(engine, unit.communicators.outer));
  info.mesh.push_back(dim_of(engine, unit.communicators.gather));
  return info;
}

std::string shown(const std::vector<MeshDim>& mesh) {
  return joined(mesh, " x ", [](const MeshDim& dim) { return (dim.name.empty() ? "" : dim.name + "=") + std::to_string(dim.size); });
}

/// Returns a text of the bytes with their dtypes, in which unsharded parameters and shards may differ.
std::string shown(std::int64_t bytes, const std::vector<UnitDtypes>& all, at::ScalarType UnitDtypes::*which) {
  std::string text;
  std::vector<at::ScalarType> once;
  for (const auto& dtypes : all) {
    if (std::find(once.begin(), once.end(), dtypes.*which) != once.end()) continue;
    once.push_back(dtypes.*which);
    text += std::string(once.size() == 1 ? " " : "+") + c10::toString(dtypes.*which);
  }
  return std::to_string(bytes) + text;
}

std::string shown(const std::vector<UnitDtypes>& all) {
  return joined(all, "; ", [](const UnitDtypes& dtypes) {
    std::string text = c10::toString(dtypes.param);
    if (dtypes.gather_format) text += " (gather format)";
    for (const auto dtype : {dtypes.main_param, dtypes.main_grad, dtypes.grad_comm}) text += std::string(" ") + c10::toString(dtype);
    return text;
  });
}

}  // namespace

std::vector<UnitInfo> FSDPModule::units() const {
  std::vector<UnitInfo> units;
  for (const auto& unit : engine_->units()) units.push_back(info_of(*engine_, *unit));
  return units;
}

std::string to_string(const std::vector<UnitInfo>& units) {
  std::vector<std::vector<std::string>> lines = {
      {"unit", "parameters", "whole bytes", "shard bytes", "reshard", "mesh", "dtypes: param, main, gradient, wire"}};
  std::int64_t whole_bytes = 0;
  std::int64_t shard_bytes = 0;
  std::size_t parameters = 0;
  for (const auto& unit : units) {
    lines.push_back({unit.name, std::to_string(unit.parameters.size()), shown(unit.whole_bytes, unit.dtypes, &UnitDtypes::param),
                     shown(unit.shard_bytes, unit.dtypes, &UnitDtypes::main_param), unit.reshard_after_forward ? "yes" : "no",
                     shown(unit.mesh), shown(unit.dtypes)});
    whole_bytes += unit.whole_bytes;
    shard_bytes += unit.shard_bytes;
    parameters += unit.parameters.size();
  }
  lines.push_back({"all", std::to_string(parameters), std::to_string(whole_bytes), std::to_string(shard_bytes), "", "", ""});
  return table(lines, 3);
}

std::ostream& operator<<(std::ostream& stream, const std::vector<UnitInfo>& units) { return stream << to_string(units); }

}  // namespace fsdp
