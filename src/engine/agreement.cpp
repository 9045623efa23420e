#include "engine/agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>

#include "base/stable_hash.h"
#include "fsdp/error.h"

namespace fsdp::engine {

Agreement agree_on_model(const comm::Ranks& ranks, const std::string& text) {
  static std::atomic<std::int64_t> last = 0;
  const auto hash = static_cast<std::int64_t>(stable_hash(text));
  const auto all = ranks.exchange(at::tensor({last + 1, hash}, at::kLong), {.operation = "agreement on a model", .unit = "(model)"});
  const auto number = all.select(1, 0).max().item<std::int64_t>();
  if (number > last) last = number;
  return {.model = static_cast<std::uint64_t>(number), .same_text = all.select(1, 1).eq(hash).all().item<bool>()};
}

void agree(std::span<const std::unique_ptr<Unit>> units, std::span<const std::string> settings) {
  std::vector<const UnitCommunicators*> asked;
  const auto same = [](const UnitCommunicators& a, const UnitCommunicators& b) { return a.gather == b.gather && a.outer == b.outer; };
  for (const auto& first : units) {
    const auto& row = first->communicators;
    if (std::any_of(asked.begin(), asked.end(), [&](const auto* other) { return same(*other, row); })) continue;
    asked.push_back(&row);
    std::string text;
    for (const auto& unit : units) {
      if (same(unit->communicators, row)) text += unit->describe() + "unit '" + unit->name + "': " + settings[unit->index] + "\n";
    }
    const comm::Ranks ranks({row.outer, row.gather});
    const auto agreement = agree_on_model(ranks, text);
    if (!agreement.same_text) ranks.compare(text, {.operation = "fully_shard", .unit = first->name});
    for (const auto& unit : units) {
      if (same(unit->communicators, row)) unit->model = agreement.model;
    }
  }
}

}  // namespace fsdp::engine
