#include "access_map.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace sim {

/// Afterwards, no cell contains both the address and the byte before it.
void AccessMap::cut(std::uintptr_t address) {
  auto cell = cells_.upper_bound(address);
  if (cell == cells_.begin()) return;
  --cell;
  if (cell->first == address || cell->second.end <= address) return;
  Cell right = cell->second;
  cell->second.end = address;
  cells_.emplace(address, std::move(right));
}

/// Afterwards, cells cover the range, and no others overlap with it.
void AccessMap::fill(std::uintptr_t begin, std::uintptr_t end) {
  cut(begin);
  cut(end);
  auto cell = cells_.lower_bound(begin);
  for (auto at = begin; at < end;) {
    if (cell == cells_.end() || cell->first > at) {
      const auto gap_end = cell == cells_.end() ? end : std::min(end, cell->first);
      cell = cells_.emplace_hint(cell, at, Cell{.end = gap_end, .write = {}, .reads = {}});
    }
    at = cell->second.end;
    ++cell;
  }
}

void AccessMap::add(const Clock& clock, const Access& access, const Range& range, const OnConflict& on_conflict) {
  fill(range.begin, range.end);
  const auto first = cells_.lower_bound(range.begin);
  const auto last = cells_.lower_bound(range.end);
  for (auto it = first; it != last; ++it) {
    Cell& cell = it->second;
    if (!clock.knows(cell.write)) on_conflict(range.write ? Conflict::kWriteAfterWrite : Conflict::kReadAfterWrite, cell.write);
    if (!range.write) {
      // Whoever is behind this read is behind those that it knows.
      std::erase_if(cell.reads, [&](const Access& read) { return read.agent == access.agent || clock.knows(read); });
      cell.reads.push_back(access);
      continue;
    }
    for (const Access& read : cell.reads) {
      if (!clock.knows(read)) on_conflict(Conflict::kWriteAfterRead, read);
    }
    cell.reads.clear();
    cell.write = access;
  }
  if (range.write && first != last) {  // They are alike now.
    first->second.end = range.end;
    cells_.erase(std::next(first), last);
  }
}

void AccessMap::for_each(std::uintptr_t begin, std::uintptr_t end, const std::function<void(const Access&)>& visit) {
  cut(begin);
  cut(end);
  for (auto cell = cells_.lower_bound(begin); cell != cells_.end() && cell->first < end; ++cell) {
    visit(cell->second.write);
    for (const Access& read : cell->second.reads) visit(read);
  }
}

void AccessMap::forget(std::uintptr_t begin, std::uintptr_t end) {
  cut(begin);
  cut(end);
  cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
}

}  // namespace sim
