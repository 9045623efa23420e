// Units that not all ranks use: Engine::attend.

#include "engine/attendance.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/stream_capture.h"
#include "comm/mesh/ranks.h"
#include "engine/engine.h"
#include "fsdp/error.h"

namespace fsdp::engine {
namespace {

/// What each rank tells the others: first of itself, then of each unit.
enum Answer : std::uint8_t { kIsPresent = 1, kDivides = 2, kLacks = 1, kHolds = 2 };

std::uint8_t answer_of(const Unit& unit) {
  const bool lacks = unit.state() == ParameterState::kSharded, holds = unit.whole.use == UseState::kAttended;
  return static_cast<std::uint8_t>((lacks ? kLacks : 0) | (holds ? kHolds : 0));
}

/// The answers of all ranks, in the order of comm::Ranks.
class Answers {
 public:
  Answers(const comm::Ranks& ranks, std::vector<std::uint8_t> mine, const comm::Label& label)
      : all_(ranks.exchange(at::from_blob(mine.data(), {static_cast<std::int64_t>(mine.size())}, at::kByte), label)) {}

  bool has(std::int64_t rank, std::size_t column, std::uint8_t bit) const {
    return (all_.const_data_ptr<std::uint8_t>()[rank * all_.size(1) + static_cast<std::int64_t>(column)] & bit) != 0;
  }
  std::int64_t count(std::size_t column, std::uint8_t bit) const {
    std::int64_t count = 0;
    for (std::int64_t rank = 0; rank < ranks(); ++rank) count += has(rank, column, bit) ? 1 : 0;
    return count;
  }
  std::int64_t ranks() const { return all_.size(0); }
  /// For each rank of this one's row of the unit, whether `holds` is true of it.
  template <typename Holds>
  std::vector<bool> in_row(const Unit& unit, const Holds& holds) const {
    const std::int64_t inner = unit.communicators.gather->size(), first = unit.communicators.outer_rank() * inner;
    std::vector<bool> row;
    for (std::int64_t rank = first; rank < first + inner; ++rank) row.push_back(holds(rank));
    return row;
  }

 private:
  at::Tensor all_;
};

}  // namespace

void Engine::attend(std::span<Unit* const> units, const Attend& attend) {
  const auto lock = this->lock_for_use();
  refuse_in_capture(options_.device(), "attend", "call it before the capture");
  for (const Unit* unit : units) {
    if (!attend.divide_by_present || unit->options.gradient_divide_factor == 0) continue;
    throw Error("attend: gradients of unit '" + unit->name + "' are divided by set_gradient_divide_factor's " +
                std::to_string(unit->options.gradient_divide_factor) +
                ", so divide_by_present can't divide them, too; leave one of both out");
  }
  const at::NoGradGuard no_grad;
  if (backward_ == BackwardState::kRunning && backward_alive_.expired()) reset_locked();
  if (attend.backward_may_follow) backward_may_follow_ = true;
  guarded([&] {
    if (current_ == nullptr) {
      main_parameters_.refuse_torn();
      main_parameters_.validate();
    }
    std::vector<Unit*> left(units.begin(), units.end());
    while (!left.empty()) {
      const auto* const gather = left.front()->communicators.gather.get();
      const auto* const outer = left.front()->communicators.outer.get();
      const auto others = std::stable_partition(left.begin(), left.end(), [&](const Unit* unit) {
        return unit->communicators.gather.get() == gather && unit->communicators.outer.get() == outer;
      });
      attend_together({left.begin(), others}, attend);
      left.erase(left.begin(), others);
    }
    if (!is_confirmed_later()) confirm();
  });
}

/// Units on the same ranks share one exchange.
void Engine::attend_together(std::span<Unit* const> units, const Attend& attend) {
  const Unit& first = *units.front();
  std::vector<std::uint8_t> mine = {
      static_cast<std::uint8_t>((attend.present ? kIsPresent : 0) | (attend.divide_by_present ? kDivides : 0))};
  for (Unit* unit : units) {
    if (unit->state() == ParameterState::kGathering) gatherer_.finish(*unit);
    mine.push_back(answer_of(*unit));
  }
  const Answers answers(comm::Ranks({first.communicators.outer, first.communicators.gather}), std::move(mine), first.label("attendance"));
  const auto divides = answers.count(0, kDivides);
  if (divides != 0 && divides != answers.ranks()) {
    throw Error("attend: of the " + std::to_string(answers.ranks()) + " ranks of unit '" + first.name + "', " + std::to_string(divides) +
                " divide gradients by the number of ranks that are present (divide_by_present); all must, or none");
  }
  const auto present = answers.count(0, kIsPresent);
  // Units that are as any other in this forward: all ranks use them, and have them in the same state.
  std::vector<std::uint8_t> apart;
  for (std::size_t k = 0; k < units.size(); ++k) {
    const auto lack = answers.count(k + 1, kLacks);
    const bool same_state = answers.count(k + 1, kHolds) == 0 && (lack == 0 || lack == answers.ranks());
    apart.push_back(present == answers.ranks() && same_state ? 0 : 1);
  }
  // All ranks of the model have to move alike, also those on which a unit has other ranks.
  if (answers.ranks() != options_.mesh.size()) comm::Ranks(options_.mesh).unite(apart, first.label("attendance of all ranks"));
  for (std::size_t k = 0; k < units.size(); ++k) {
    Unit& unit = *units[k];
    auto& attendance = unit.attendance;
    attendance.optional = true;
    attendance.divides_by_present = attend.divide_by_present;
    attendance.skips = !attend.present;
    if (present == 0) continue;
    attendance.gives = attendance.gives || (attend.present && backward_may_follow_);
    if (apart[k] == 0) {
      attendance.by_all = attendance.by_all || backward_may_follow_;
      continue;
    }
    gatherer_.write_back(unit);  // On all ranks, because some free their copies now, and give main parameters to others later.
    // Ranks that hold replicated parameters at all times, or build the parameters from what arrives, take part in every gather.
    const bool all_receive = unit.replicated_parameters() || unit.whole.extension != nullptr;
    const auto receives = [&](std::int64_t rank) {
      const bool needs = answers.has(rank, 0, kIsPresent) || attendance.by_all || all_receive;
      return needs && answers.has(rank, k + 1, kLacks);
    };
    bool any_receives = false;
    for (std::int64_t rank = 0; rank < answers.ranks(); ++rank) any_receives = any_receives || receives(rank);
    if (any_receives) gather_for(unit, answers.in_row(unit, receives));
    // Units that no backward needs are left as any other.
    const bool is_left = std::erase(occupied_, &unit) > 0 || unit.whole.use != UseState::kAttended;
    std::erase(ahead_, &unit);
    if (attend.present || attendance.by_all || !is_left) {
      set_use(unit, UseState::kAttended);
      if (is_left && !backward_may_follow_) occupied_.push_back(&unit);
    } else if (unit.whole.use != UseState::kPinned) {
      set_use(unit, UseState::kUnused);
      gatherer_.evict(unit);
    }
  }
}

/// If some ranks keep an optional unit for a backward, the others gather it, and keep it as long. Returns false if no rank keeps it: it is
/// then unsharded as any other.
bool Engine::unshard_attended(Unit& unit) {
  if (!unit.attendance.optional) return false;
  if (unit.whole.use == UseState::kAttended && std::erase(occupied_, &unit) > 0) evict(unit);  // What an evaluation has left.
  const Answers answers(comm::Ranks({unit.communicators.outer, unit.communicators.gather}), {answer_of(unit)}, unit.label("attendance"));
  if (answers.count(0, kHolds) == 0) return false;
  if (answers.count(0, kLacks) > 0) gather_for(unit, answers.in_row(unit, [&](std::int64_t rank) { return answers.has(rank, 0, kLacks); }));
  set_use(unit, UseState::kAttended);
  return true;
}

/// Gathers the unit on ranks that lack it. `receives`: whether each rank of the row does.
void Engine::gather_for(Unit& unit, std::vector<bool> receives) {
  if (unit.whole.extension) {
    gatherer_.evict(unit);
    receives.assign(receives.size(), true);
  }
  unit.whole.post_forward.release();
  gatherer_.bring_shards(unit);
  if (std::count(receives.begin(), receives.end(), true) == 0) return;
  if (!receives[static_cast<std::size_t>(unit.communicators.gather->rank())]) return gatherer_.give(unit, receives);
  gatherer_.start(unit, receives);
  gatherer_.finish(unit);
}

}  // namespace fsdp::engine
