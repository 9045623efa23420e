#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/classic_stream.h"
#include "base/text.h"
#include "fsdp/plan.h"

namespace fsdp {
namespace {

using Line = std::vector<std::string>;

constexpr std::string_view kIndent = "  ";

std::string in_units(double value, double step, const std::vector<const char*>& units) {
  std::size_t unit = 0;
  while (value >= step && unit + 1 < units.size()) {
    value /= step;
    ++unit;
  }
  return with_decimals(value, unit == 0 ? 0 : 2) + (*units[unit] == '\0' ? "" : " ") + units[unit];
}

/// A bar of up to 30 signs for a share of the whole.
std::string bar(std::int64_t bytes, std::int64_t whole) {
  constexpr std::int64_t kWidth = 30;
  return std::string(static_cast<std::size_t>(whole == 0 ? 0 : (bytes * kWidth + whole / 2) / whole), '#');
}

/// Each kind of memory: its name, its bytes at the peak, the most of it in a step, and its bytes at FSDP2's peak.
struct PlannedKind {
  const char* name;
  std::int64_t at_peak;
  std::int64_t most;
  std::int64_t fsdp2;
};

std::vector<PlannedKind> kinds_of(const Plan& plan) {
  const auto& peak = plan.peak;
  const auto& memory = plan.memory;
  const auto fsdp2 = plan.fsdp2 ? plan.fsdp2->peak : PlanBytes();
  std::int64_t activations = 0;
  for (const auto& unit : plan.units) activations += unit.activations;
  return {{"main parameters", peak.main_parameters, memory.main_parameters.peak, fsdp2.main_parameters},
          {"main gradients", peak.main_gradients, std::max(memory.main_gradients.peak, peak.main_gradients), fsdp2.main_gradients},
          {"optimizer state", peak.optimizer_state, std::max(memory.optimizer_state.peak, peak.optimizer_state), fsdp2.optimizer_state},
          {"gathered parameters", peak.gathered_parameters, memory.gathered_parameters.peak, fsdp2.gathered_parameters},
          {"unreduced gradients", peak.unreduced_gradients, memory.unreduced_gradients.peak, fsdp2.unreduced_gradients},
          {"communication", peak.communication, memory.communication.peak, fsdp2.communication},
          {"unused slots", peak.unused_slots, peak.unused_slots, fsdp2.unused_slots},
          {"activations", peak.activations, activations, fsdp2.activations}};
}

/// The units, with those that are alike in one row.
std::vector<Line> unit_rows(const Plan& plan) {
  std::vector<Line> rows = {{"unit", "elements", "main", "gradients", "optimizer", "gathered", "unreduced", "staging", "padding"}};
  const auto same = [](const PlannedUnit& a, const PlannedUnit& b) {
    return a.elements == b.elements && a.gathered == b.gathered && a.main_parameters == b.main_parameters && a.unreduced == b.unreduced &&
           a.main_gradients == b.main_gradients && a.communication == b.communication && a.optimizer_state == b.optimizer_state;
  };
  for (std::size_t first = 0; first < plan.units.size();) {
    std::size_t end = first + 1;
    while (end < plan.units.size() && same(plan.units[first], plan.units[end])) ++end;
    const auto& unit = plan.units[first];
    const auto count = end - first;
    const auto name = count == 1 ? unit.name : unit.name + " to " + plan.units[end - 1].name + " (" + std::to_string(count) + ", each)";
    rows.push_back({name, in_units(static_cast<double>(unit.elements), 1000, {"", "K", "M", "B"}), size_text(unit.main_parameters),
                    size_text(unit.main_gradients), size_text(unit.optimizer_state), size_text(unit.gathered), size_text(unit.unreduced),
                    size_text(unit.communication), size_text(unit.padding)});
    first = end;
  }
  return rows;
}

nlohmann::ordered_json json_of(const PlanBytes& bytes) {
  return {{"main_parameters", bytes.main_parameters},
          {"main_gradients", bytes.main_gradients},
          {"optimizer_state", bytes.optimizer_state},
          {"gathered_parameters", bytes.gathered_parameters},
          {"unreduced_gradients", bytes.unreduced_gradients},
          {"communication", bytes.communication},
          {"unused_slots", bytes.unused_slots},
          {"activations", bytes.activations},
          {"host", bytes.host},
          {"device", bytes.device()}};
}

nlohmann::ordered_json json_of(const MemoryStats& stats) {
  nlohmann::ordered_json json;
  const std::vector<std::pair<const char*, const MemoryUse&>> uses = {{"main_parameters", stats.main_parameters},
                                                                      {"main_gradients", stats.main_gradients},
                                                                      {"gathered_parameters", stats.gathered_parameters},
                                                                      {"unreduced_gradients", stats.unreduced_gradients},
                                                                      {"communication", stats.communication},
                                                                      {"optimizer_state", stats.optimizer_state},
                                                                      {"total", stats.total},
                                                                      {"host", stats.host},
                                                                      {"slots", stats.slots}};
  for (const auto& [name, use] : uses) json[name] = {{"live", use.live}, {"peak", use.peak}};
  return json;
}

nlohmann::ordered_json json_of(const WireStats& stats) {
  return {{"all_gather_bytes", stats.all_gather_bytes}, {"reduce_scatter_bytes", stats.reduce_scatter_bytes},
          {"control_bytes", stats.control_bytes},       {"shared_memory_bytes", stats.shared_memory_bytes},
          {"all_gathers", stats.all_gathers},           {"reduce_scatters", stats.reduce_scatters}};
}

/// The table of memory by kind, with bars in the last column.
std::string memory_table(const Plan& plan) {
  std::vector<Line> rows = {{"", "at the peak", "most"}};
  std::vector<std::string> bars = {""};
  if (plan.fsdp2) rows[0].emplace_back("FSDP2");
  const auto add = [&](const char* name, std::int64_t at_peak, const std::string& most, std::int64_t fsdp2) {
    rows.push_back({name, size_text(at_peak), most});
    if (plan.fsdp2) rows.back().push_back(size_text(fsdp2));
  };
  for (const auto& [name, at_peak, most, fsdp2] : kinds_of(plan)) {
    add(name, at_peak, size_text(most), fsdp2);
    bars.push_back(at_peak > 0 ? bar(at_peak, plan.peak.device()) : "");
  }
  const auto numbers = rows[0].size() - 1;
  for (std::size_t k = 0; k < bars.size(); ++k) rows[k].push_back(bars[k]);
  add("device", plan.peak.device(), "", plan.fsdp2 ? plan.fsdp2->peak.device() : 0);
  const auto host_of_fsdp2 = plan.fsdp2 ? plan.fsdp2->peak.host : 0;
  auto host = std::max(plan.memory.host.peak, plan.peak.host);
  for (const auto& moment : plan.moments) host = std::max(host, moment.most.host);
  if (host > 0) add("host", plan.peak.host, size_text(host), host_of_fsdp2);
  auto text = table(rows, numbers, kIndent);
  if (plan.fsdp2) text += "  (FSDP2 has its peak in " + plan.fsdp2->moment + ".)\n";
  return text;
}

}  // namespace

std::string Plan::text() const {
  std::string text = std::to_string(ranks) + (ranks == 1 ? " rank, " : " ranks, ") +
                     in_units(static_cast<double>(elements), 1000, {"", "K", "M", "B"}) + " elements in " + std::to_string(units.size()) +
                     (units.size() == 1 ? " unit\n" : " units\n");
  text += "\nMemory of a rank. Its peak is in " + moment + ":\n";
  text += memory_table(*this) + "\nUnits:\n" + table(unit_rows(*this), 8, kIndent) + "\nSent by a rank in a step:\n";
  std::vector<Line> rows = {{"dimension", "ranks", "gathers", "reductions", "control"}};
  for (const auto& link : links) {
    rows.push_back({link.dim, std::to_string(link.ranks), size_text(link.sent.all_gather_bytes), size_text(link.sent.reduce_scatter_bytes),
                    size_text(link.sent.control_bytes)});
  }
  return text + table(rows, 4, kIndent);
}

std::string Plan::json() const {
  nlohmann::ordered_json json = {{"ranks", ranks}, {"elements", elements}, {"peak", json_of(peak)}, {"moment", moment}};
  json["fsdp2"] = nullptr;
  if (fsdp2) json["fsdp2"] = {{"peak", json_of(fsdp2->peak)}, {"moment", fsdp2->moment}};
  json["memory"] = json_of(memory);
  json["wire"] = json_of(wire);
  for (const auto& unit : units) {
    json["units"].push_back({{"name", unit.name},
                             {"elements", unit.elements},
                             {"main_parameters", unit.main_parameters},
                             {"main_gradients", unit.main_gradients},
                             {"optimizer_state", unit.optimizer_state},
                             {"gathered", unit.gathered},
                             {"unreduced", unit.unreduced},
                             {"communication", unit.communication},
                             {"padding", unit.padding},
                             {"activations", unit.activations},
                             {"checkpoint", unit.checkpoint}});
  }
  for (const auto& [what, most] : moments) json["moments"].push_back({{"what", what}, {"most", json_of(most)}});
  for (const auto& link : links) json["links"].push_back({{"dim", link.dim}, {"ranks", link.ranks}, {"sent", json_of(link.sent)}});
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::ostream& operator<<(std::ostream& stream, const Plan& plan) { return stream << plan.text(); }

}  // namespace fsdp
