#include "engine/schedule.h"

#include <algorithm>

namespace fsdp::engine {

void Schedule::begin(Pass pass) {
  if (current_ != kNone) successor_[static_cast<std::size_t>(pass_)][key(before_, current_)] = kNone;
  if (!moves_.empty()) recorded_[static_cast<std::size_t>(pass_)].swap(moves_);
  moves_.clear();
  pass_ = pass;
  before_ = kNone;
  current_ = kNone;
}

void Schedule::move_to(std::size_t unit) {
  successor_[static_cast<std::size_t>(pass_)][key(before_, current_)] = unit;
  before_ = current_;
  current_ = unit;
  moves_.push_back(unit);
}

std::vector<std::size_t> Schedule::next(int depth) const {
  std::vector<std::size_t> units;
  const auto& successor = successor_[static_cast<std::size_t>(pass_)];
  std::size_t before = before_;
  std::size_t unit = current_;
  // A cycle of already listed units would never end. As many steps as the table has entries visit everything.
  for (std::size_t step = 0; step < successor.size() && units.size() < static_cast<std::size_t>(depth); ++step) {
    const auto found = successor.find(key(before, unit));
    if (found == successor.end() || found->second == kNone) break;
    before = unit;
    unit = found->second;
    if (unit != current_ && std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
  }
  return units;
}

}  // namespace fsdp::engine
