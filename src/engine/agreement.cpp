#include "engine/agreement.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "base/stable_hash.h"
#include "comm/call.h"
#include "fsdp/error.h"

namespace fsdp::engine {
namespace {

/// Returns the text that ranks compare about units on the same ranks.
std::string describe(const std::vector<Unit*>& units, std::span<const UnitText> texts) {
  std::string text;
  for (const auto* unit : units) text += unit->describe() + "unit '" + unit->name + "': " + texts[unit->place.index].settings + "\n";
  return text;
}

/// Finds the first parameter whose initial values differ. A parameter is not compared with ranks that have no checksum of it.
std::optional<DifferentValues> different_values(const std::vector<Unit*>& units, const comm::Ranks& ranks, std::vector<std::int64_t> values,
                                                std::int64_t global_rank) {
  values.insert(values.begin(), global_rank);
  const auto all = ranks.exchange(at::tensor(values, at::kLong), {.operation = "comparison of first values", .unit = "(model)"});
  const auto* of_first = all.const_data_ptr<std::int64_t>();
  for (std::int64_t rank = 1; rank < all.size(0); ++rank) {
    const auto* of_other = of_first + rank * all.size(1);
    std::size_t at = 1;
    for (const auto* unit : units) {
      for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
        const auto a = of_first[at], b = of_other[at];
        ++at;
        if (a == b || a == 0 || b == 0) continue;
        auto text =
            std::string("ranks ").append(std::to_string(of_first[0])) + " and " + std::to_string(of_other[0]) +
            " began with different values of parameter '" + unit->parameters[i].name + "' of unit '" + unit->name +
            "', and nothing has been written to it since: each rank has its rows of its own values. Seed all ranks alike before the "
            "model is made, or load or broadcast values before the first forward. With check_initial_values this is an error of "
            "fully_shard";
        return DifferentValues{.unit = unit, .parameter = i, .text = std::move(text)};
      }
    }
  }
  return std::nullopt;
}

}  // namespace

Agreement agree_on_model(const comm::Ranks& ranks, const std::string& text, std::span<const std::int64_t> first_values) {
  static std::atomic<std::int64_t> last = 0;
  const auto hash = static_cast<std::int64_t>(stable_hash(text));
  std::uint64_t of_values = 0;
  for (const auto value : first_values) of_values = mix(of_values, static_cast<std::uint64_t>(value));
  const std::vector<std::int64_t> facts = {last + 1, hash, static_cast<std::int64_t>(of_values)};
  const auto all = ranks.exchange(at::tensor(facts, at::kLong), {.operation = "agreement on a model", .unit = "(model)"});
  const auto number = all.select(1, 0).max().item<std::int64_t>();
  if (number > last) last = number;
  return {.model = static_cast<std::uint64_t>(number),
          .same_text = all.select(1, 1).eq(facts[1]).all().item<bool>(),
          .same_values = all.select(1, 2).eq(facts[2]).all().item<bool>()};
}

std::vector<DifferentValues> agree(std::span<const std::unique_ptr<Unit>> units, std::span<const UnitText> texts,
                                   std::int64_t global_rank) {
  // Python's dispatch modes (for fake tensors, or to count operators) apply to the model's computation only.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
  std::vector<DifferentValues> different;
  std::vector<bool> done(units.size(), false);
  for (const auto& first : units) {
    if (done[first->place.index]) continue;
    const auto& row = first->communicators;
    std::vector<Unit*> together;
    std::vector<std::int64_t> values;
    for (const auto& unit : units) {
      if (unit->communicators.gather != row.gather || unit->communicators.outer != row.outer) continue;
      done[unit->place.index] = true;
      together.push_back(unit.get());
      const auto& of_unit = texts[unit->place.index].first_values;
      values.insert(values.end(), of_unit.begin(), of_unit.end());
    }
    const comm::Ranks ranks({row.outer, row.gather});
    const auto text = describe(together, texts);
    const auto agreement = agree_on_model(ranks, text, values);
    if (!agreement.same_text) ranks.compare(text, {.operation = "fully_shard", .unit = first->name});
    if (!agreement.same_values) {
      if (auto found = different_values(together, ranks, values, global_rank)) different.push_back(std::move(*found));
    }
    for (auto* unit : together) unit->place.model = agreement.model;
  }
  return different;
}

}  // namespace fsdp::engine
