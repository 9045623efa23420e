#include "replay/comparison.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "base/text.h"
#include "replay/digest.h"

namespace fsdp::replay {
namespace {

constexpr comm::Label kCheck = {.operation = "check of a microbatch", .unit = {}};

// Bits of a rank's flags for a unit.
constexpr std::int64_t kRememberedDiffers = 1;
constexpr std::int64_t kMainChanged = 2;
constexpr std::int64_t kWholeChanged = 4;
constexpr std::int64_t kOwnDiffers = 8;
constexpr std::int64_t kUnreducedChanged = 16;
constexpr std::int64_t kSumsDiffer = 32;
constexpr std::int64_t kWritten = 64;

std::int64_t bit(bool set, std::int64_t value) { return set ? value : 0; }

/// Whether the unsharded parameters, when they were first seen, had other values than this rank's main parameters.
bool own_differs(const engine::Unit& unit, const MainTestimony& main, const UnitRecord& record) {
  if (record.whole.empty()) return false;
  const auto first = static_cast<std::size_t>(unit.main_pieces().first);
  return !std::equal(main.as_gathered.begin(), main.as_gathered.end(), record.whole.begin() + static_cast<std::ptrdiff_t>(first));
}

std::int64_t one_of(std::span<const std::int64_t> digests) {
  std::int64_t all = 0;
  for (std::size_t i = 0; i < digests.size(); ++i) all = with_digest(all, digests[i], i);
  return all;
}

std::string of_unit(const engine::Unit& unit) { return " of unit '" + unit.name + "'"; }

}  // namespace

RankComparison::RankComparison(const Testimony& testimony, std::vector<std::size_t> units, std::int64_t global_rank)
    : testimony_(testimony),
      units_(std::move(units)),
      ranks_({testimony.units[units_.front()]->communicators.outer, testimony.units[units_.front()]->communicators.gather}) {
  std::vector<std::int64_t> mine = {global_rank};
  for (const auto unit : units_) {
    const auto numbers = numbers_of(unit);
    mine.insert(mine.end(), numbers.begin(), numbers.end());
  }
  const auto all = ranks_.exchange(at::tensor(mine, at::kLong), kCheck).contiguous();
  const auto* values = all.const_data_ptr<std::int64_t>();
  columns_.resize(units_.size());
  for (std::int64_t rank = 0; rank < ranks_.size(); ++rank) {
    global_ranks_.push_back(*values++);
    for (auto& column : columns_) {
      for (auto* numbers : {&column.flags, &column.whole, &column.gradients, &column.unreduced, &column.order})
        numbers->push_back(*values++);
    }
  }
  for (auto& column : columns_) column.repeated.resize(global_ranks_.size());
}

std::vector<std::int64_t> RankComparison::numbers_of(std::size_t unit) const {
  const auto& main = testimony_.main[unit];
  const auto& record = testimony_.own.of(unit);
  std::int64_t flags = bit(main.remembered_differs, kRememberedDiffers) | bit(record.unreduced_changed, kUnreducedChanged) |
                       bit(record.sums_differ, kSumsDiffer) | bit(record.written, kWritten);
  if (!record.written) {
    flags |= bit(main.changed, kMainChanged) | bit(record.whole_changed, kWholeChanged) |
             bit(own_differs(*testimony_.units[unit], main, record), kOwnDiffers);
  }
  return {flags, one_of(record.whole), record.gradients, record.unreduced, record.order};
}

std::size_t RankComparison::index_of(std::int64_t rank) const {
  return static_cast<std::size_t>(std::find(global_ranks_.begin(), global_ranks_.end(), rank) - global_ranks_.begin());
}

std::vector<std::string> RankComparison::compare_data() const {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    const auto& column = columns_[i];
    const auto& unit = *testimony_.units[units_[i]];
    const auto is_written = [](std::int64_t flags) { return (flags & kWritten) != 0; };
    const bool written = std::any_of(column.flags.begin(), column.flags.end(), is_written);
    const bool same = std::equal(column.whole.begin() + 1, column.whole.end(), column.whole.begin());
    if (!written && !same) {
      for (auto& line : compare_whole(units_[i], column)) lines.push_back(std::move(line));
    }
    add_flags(lines, unit, column);
  }
  return lines;
}

/// The findings that ranks made without each other. `lines` may contain already that unsharded parameters differ.
void RankComparison::add_flags(std::vector<std::string>& lines, const engine::Unit& unit, const Column& column) const {
  const auto add = [&](std::int64_t flag, const std::string& before, const std::string& after) {
    std::vector<std::int64_t> found;
    for (std::size_t rank = 0; rank < column.flags.size(); ++rank) {
      if ((column.flags[rank] & flag) != 0) found.push_back(global_ranks_[rank]);
    }
    if (!found.empty()) lines.push_back(before + of_unit(unit) + after + " on " + names_of_ranks(found));
  };
  const bool whole_differs = !std::equal(column.whole.begin() + 1, column.whole.end(), column.whole.begin());
  add(kRememberedDiffers, "main parameters", " are not those that remember_parameters() has seen after the update: memory has changed");
  add(kMainChanged, "main parameters", " have changed in memory during forward and backward");
  // What was gathered from them follows.
  const bool main_changed = std::any_of(column.flags.begin(), column.flags.end(), [](auto flags) { return (flags & kMainChanged) != 0; });
  if (main_changed) return;
  add(kWholeChanged, "gathered parameters", " have changed in memory while they were in use");
  if (!whole_differs) add(kOwnDiffers, "gathered parameters", ", the same on all ranks, are not the main parameters that were sent");
  add(kUnreducedChanged, "unreduced gradients", " have changed in memory while they were reduced");
  add_sums(lines, unit, column);
}

/// If two sums of the same gradients differ, one of them is wrong, either on the rank that has them or on the way there.
void RankComparison::add_sums(std::vector<std::string>& lines, const engine::Unit& unit, const Column& column) const {
  const auto inner = static_cast<std::size_t>(unit.communicators.gather->size());
  for (std::size_t rank = 0; rank < column.flags.size(); ++rank) {
    if ((column.flags[rank] & kSumsDiffer) == 0) continue;
    std::vector<std::int64_t> senders;  // of its row, and its replicas
    for (std::size_t other = 0; other < column.flags.size(); ++other) {
      if (other != rank && (other / inner == rank / inner || other % inner == rank % inner)) senders.push_back(global_ranks_[other]);
    }
    lines.push_back("reduced gradients" + of_unit(unit) + " had other bits when they were reduced again on rank " +
                    std::to_string(global_ranks_[rank]) + ": it has summed wrongly, or what " + names_of_ranks(senders) +
                    (senders.size() == 1 ? " has" : " have") + " sent to it was damaged");
  }
}

/// Finds the ranks whose unsharded parameters are wrong, and from which rank they have the wrong piece.
std::vector<std::string> RankComparison::compare_whole(std::size_t unit_index, const Column& column) const {
  const auto& unit = *testimony_.units[unit_index];
  auto mine = testimony_.own.of(unit_index).whole;
  const auto pieces = static_cast<std::size_t>(unit.layout.world_size());
  mine.resize(pieces + 1, 0);
  const auto all = ranks_.exchange(at::tensor(mine, at::kLong), kCheck).contiguous();
  const auto* values = all.const_data_ptr<std::int64_t>();
  const auto value_of = [&](std::size_t rank, std::size_t piece) { return values[rank * (pieces + 1) + piece]; };
  const auto inner = static_cast<std::size_t>(unit.communicators.gather->size());
  const auto by_votes = [&](std::size_t piece, std::span<const std::size_t> ranks) -> std::optional<std::string> {
    std::vector<Vote> votes;
    for (const auto rank : ranks) votes.push_back({.rank = global_ranks_[rank], .value = value_of(rank, piece)});
    const auto verdict = decide(votes);
    if (verdict.agreed) return std::nullopt;
    if (verdict.decided) {
      return "parameters" + of_unit(unit) + " differ: " + names_of_ranks(verdict.wrong) + " against " + names_of_ranks(verdict.right) +
             ", which agree";
    }
    return "parameters" + of_unit(unit) + " differ between " + names_of_ranks(verdict.right) + "; which are right can't be decided";
  };
  std::vector<std::size_t> everyone(global_ranks_.size());
  for (std::size_t rank = 0; rank < everyone.size(); ++rank) everyone[rank] = rank;
  std::vector<std::string> lines;
  std::set<std::pair<std::size_t, std::size_t>> wrong;  // rank, and from whom
  for (std::size_t piece = 0; piece < pieces && !unit.replicated_optimizer(); ++piece) {
    const auto owner_in_row = piece / (pieces / inner);
    for (std::size_t rank = 0; rank < global_ranks_.size(); ++rank) {
      const auto owner = rank / inner * inner + owner_in_row;
      if (value_of(rank, piece) == value_of(owner, piece)) continue;
      // The owner compares with its main parameters.
      const bool owner_is_right = (column.flags[owner] & kOwnDiffers) == 0;
      wrong.emplace(owner_is_right ? rank : owner, owner);
    }
  }
  for (const auto& [rank, owner] : wrong) {
    lines.push_back("gathered parameters" + of_unit(unit) + " are wrong on rank " + std::to_string(global_ranks_[rank]) +
                    (rank == owner ? ", in its own shard's place" : ", in the shard of rank " + std::to_string(global_ranks_[owner])));
  }
  // Replicas that differ, and formats whose places are not those of pieces.
  for (std::size_t piece = 0; piece <= pieces && lines.empty(); ++piece) {
    if (auto line = by_votes(piece, everyone)) lines.push_back(std::move(*line));
  }
  return lines;
}

bool RankComparison::adds_dispute(const Repetition& repetition) {
  std::vector<std::int64_t> mine = {repetition.origin};
  for (const auto unit : units_) {
    mine.push_back(repetition.record.of(unit).gradients);
    mine.push_back(repetition.record.of(unit).unreduced);
  }
  const auto all = ranks_.exchange(at::tensor(mine, at::kLong), kCheck).contiguous();
  const auto* values = all.const_data_ptr<std::int64_t>();
  for (const auto rank : global_ranks_) {
    const auto origin = index_of(*values++);
    for (auto& column : columns_) {
      const auto gradients = *values++;
      column.repeated[origin].emplace_back(rank, std::pair(gradients, *values++));
    }
  }
  for (const auto& column : columns_) {
    for (std::size_t origin = 0; origin < global_ranks_.size(); ++origin) {
      if (!decide(votes_on(column, origin)).agreed) return true;
    }
  }
  return false;
}

std::vector<Vote> RankComparison::votes_on(const Column& column, std::size_t origin) const {
  const bool knows_unreduced = column.unreduced[origin] != 0;
  const auto value = [&](std::int64_t gradients, std::int64_t unreduced) {
    return knows_unreduced ? with_digest(gradients, unreduced, 0) : gradients;
  };
  std::vector<Vote> votes = {{.rank = global_ranks_[origin], .value = value(column.gradients[origin], column.unreduced[origin])}};
  for (const auto& [rank, digests] : column.repeated[origin]) {
    votes.push_back({.rank = rank, .value = value(digests.first, digests.second)});
  }
  return votes;
}

/// Names the unit that came first in the backward: an error of the computation spreads from there to later units.
std::optional<std::string> RankComparison::settle_dispute() const {
  for (std::size_t origin = 0; origin < global_ranks_.size(); ++origin) {
    std::optional<std::size_t> first;
    std::size_t differ = 0;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      if (decide(votes_on(columns_[i], origin)).agreed) continue;
      ++differ;
      if (!first || columns_[i].order[origin] < columns_[*first].order[origin]) first = i;
    }
    if (!first) continue;
    const auto verdict = decide(votes_on(columns_[*first], origin));
    auto line = "gradients" + of_unit(*testimony_.units[units_[*first]]);
    if (differ > 1) line += " (the first in backward of " + std::to_string(differ) + " whose gradients differ)";
    line += " from the batch of rank " + std::to_string(global_ranks_[origin]);
    if (!verdict.decided) return line + " differ between " + names_of_ranks(verdict.right) + "; which are right can't be decided";
    line += " are wrong on " + names_of_ranks(verdict.wrong);
    return verdict.right.empty()
               ? line + ", but not each time"
               : line + "; " + names_of_ranks(verdict.right) + (verdict.right.size() == 1 ? " has" : " have") + " found others";
  }
  return std::nullopt;
}

}  // namespace fsdp::replay
