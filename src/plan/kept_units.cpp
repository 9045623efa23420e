#include "plan/kept_units.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace fsdp::planning {
namespace {

/// The number of sums that are distinguished. A step of a real model has fewer, because its blocks have a few sizes.
constexpr std::size_t kMostSums = 4096;

/// A set of units, each of which encloses the next.
struct Chain {
  std::vector<std::size_t> units;  ///< Those that can be kept, the outermost interval first.
  std::vector<std::int64_t> load;  ///< The most bytes at moments at which a unit and those around it may be kept, and no other one.
};

constexpr std::int64_t kNoMoment = std::numeric_limits<std::int64_t>::min();

Chain chain_of(std::span<const std::int64_t> loads, std::span<const Keepable> units) {
  Chain chain;
  for (std::size_t k = 0; k < units.size(); ++k) {
    if (units[k].saved > 0 && units[k].begin < units[k].end) chain.units.push_back(k);
  }
  std::ranges::stable_sort(chain.units, [&](auto a, auto b) {
    return units[a].begin != units[b].begin ? units[a].begin < units[b].begin : units[a].end > units[b].end;
  });
  // From the inside: a unit ends where those within it have ended.
  chain.load.assign(chain.units.size(), kNoMoment);
  std::size_t inner_begin = 0;
  std::size_t inner_end = 0;
  for (std::size_t i = chain.units.size(); i-- > 0;) {
    const auto& unit = units[chain.units[i]];
    const bool innermost = i + 1 == chain.units.size();
    const auto end = innermost ? unit.end : std::max(unit.end, inner_end);
    if (innermost) inner_begin = inner_end = unit.end;
    for (std::size_t t = unit.begin; t < inner_begin; ++t) chain.load[i] = std::max(chain.load[i], loads[t]);
    for (std::size_t t = inner_end; t < end; ++t) chain.load[i] = std::max(chain.load[i], loads[t]);
    inner_begin = unit.begin;
    inner_end = end;
  }
  return chain;
}

/// One way to decide over the outer units.
struct Way {
  static constexpr std::size_t kFirst = static_cast<std::size_t>(-1);
  std::int64_t bytes = 0;
  std::int64_t saved = 0;
  std::size_t before = kFirst;  ///< The way to decide over the units around this one, among those of that unit.
  bool keeps = false;
};

/// Returns those ways than which no other has fewer bytes and saves as much, by their bytes. Of two that are alike, the one that keeps the
/// inner unit stays, which is kept for a shorter time. Each list is in the order of its bytes.
std::vector<Way> best_of(const std::vector<Way>& keeping, const std::vector<Way>& leaving) {
  std::vector<Way> best;
  const auto add = [&](const Way& way) {
    if (best.empty() || way.saved > best.back().saved) best.push_back(way);
  };
  auto left = leaving.begin();
  for (const auto& way : keeping) {
    for (; left != leaving.end() && (left->bytes < way.bytes || (left->bytes == way.bytes && left->saved > way.saved)); ++left) add(*left);
    add(way);
  }
  for (; left != leaving.end(); ++left) add(*left);
  if (best.size() <= kMostSums) return best;
  const auto step = best.back().bytes / static_cast<std::int64_t>(kMostSums) + 1;
  std::vector<Way> rounded;
  for (const auto& way : best) {  // Of the ways of a step, the last one saves most.
    if (!rounded.empty() && rounded.back().bytes / step == way.bytes / step) rounded.pop_back();
    rounded.push_back(way);
  }
  return rounded;
}

KeptUnits solve(const Chain& chain, std::span<const std::int64_t> loads, std::span<const Keepable> units, std::int64_t limit) {
  std::vector<std::vector<Way>> ways;
  for (std::size_t i = 0; i < chain.units.size(); ++i) {
    const auto& unit = units[chain.units[i]];
    const auto room = chain.load[i] == kNoMoment ? std::numeric_limits<std::int64_t>::max() : limit - chain.load[i];
    const std::vector<Way> start(1);
    const auto& around = i == 0 ? start : ways.back();
    std::vector<Way> keeping;
    std::vector<Way> leaving;
    for (std::size_t k = 0; k < around.size(); ++k) {
      const auto bytes = around[k].bytes;
      const auto saved = around[k].saved;
      if (bytes <= room) leaving.push_back({.bytes = bytes, .saved = saved, .before = k});
      if (bytes + unit.bytes > room) continue;
      keeping.push_back({.bytes = bytes + unit.bytes, .saved = saved + unit.saved, .before = k, .keeps = true});
    }
    ways.push_back(best_of(keeping, leaving));
  }
  KeptUnits result{.kept = std::vector<bool>(units.size())};
  for (std::size_t i = chain.units.size(), k = ways.empty() ? 0 : ways.back().size() - 1; i-- > 0;) {
    const auto& way = ways[i][k];
    result.kept[chain.units[i]] = way.keeps;
    if (way.keeps) result.saved += units[chain.units[i]].saved;
    k = way.before;
  }
  result.peak = std::ranges::max(loads);
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < chain.units.size(); ++i) {
    if (result.kept[chain.units[i]]) bytes += units[chain.units[i]].bytes;
    if (chain.load[i] != kNoMoment) result.peak = std::max(result.peak, chain.load[i] + bytes);
  }
  return result;
}

}  // namespace

KeptUnits choose_kept(std::span<const std::int64_t> loads, std::span<const Keepable> units, std::int64_t limit) {
  const auto least = loads.empty() ? 0 : std::ranges::max(loads);
  KeptUnits best{.kept = std::vector<bool>(units.size()), .saved = 0, .peak = least};
  const auto chain = chain_of(loads, units);
  if (least > limit || chain.units.empty()) return best;
  best = solve(chain, loads, units, limit);
  auto low = least;  // of the limits with which as much is saved, the lowest is between this one and the peak
  while (low < best.peak) {
    const auto middle = low + (best.peak - low) / 2;
    auto found = solve(chain, loads, units, middle);
    if (found.saved >= best.saved) {
      best = std::move(found);
    } else {
      low = middle + 1;
    }
  }
  return best;
}

}  // namespace fsdp::planning
