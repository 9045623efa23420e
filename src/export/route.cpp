#include "export/route.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <map>
#include <numeric>
#include <utility>

#include "comm/mesh/joined_row.h"
#include "comm/mesh/ranks.h"
#include "engine/unit.h"

namespace fsdp::weights {
namespace {

constexpr comm::Label kReceivers = {.operation = "full_weights: receivers", .unit = {}};
constexpr comm::Label kSizes = {.operation = "full_weights: sizes of shards", .unit = {}};

std::vector<std::shared_ptr<comm::Communicator>> rows_over_which_is_cut(const Entry& entry) {
  std::vector<std::shared_ptr<comm::Communicator>> rows;
  if (entry.is_cut_by_unit()) {
    if (entry.unit->options.outer_sharded_optimizer) rows.push_back(entry.unit->communicators.outer);
    rows.push_back(entry.unit->communicators.gather);
  }
  if (entry.assembly != nullptr) rows.insert(rows.end(), entry.assembly->rows.rbegin(), entry.assembly->rows.rend());
  return rows;
}

/// The one row of several, if only some of their ranks receive; nothing where there is none.
std::vector<GatherRow> joined_row_of(const std::vector<std::shared_ptr<comm::Communicator>>& cut_over, const DeviceMesh& mesh,
                                     bool receives) {
  if (std::ranges::count_if(cut_over, [](const auto& row) { return row->size() > 1; }) < 2) return {};
  const std::vector<std::shared_ptr<comm::Communicator>> outermost_first(cut_over.rbegin(), cut_over.rend());
  const comm::Ranks ranks(outermost_first);
  const auto all = ranks.exchange(at::full({1}, receives, at::kByte), kReceivers);
  const auto* data = all.const_data_ptr<std::uint8_t>();
  GatherRow row{.ranks = nullptr, .receives = std::vector<bool>(data, data + ranks.size())};
  if (!row.some_receive() || std::ranges::find(row.receives, false) == row.receives.end()) return {};
  row.ranks = comm::joined_row(mesh, outermost_first);
  return row.ranks == nullptr ? std::vector<GatherRow>() : std::vector<GatherRow>{std::move(row)};
}

/// Each row behind the others: a rank receives if some rank of the row behind it needs what it passes on.
std::vector<GatherRow> one_after_the_other(const std::vector<std::shared_ptr<comm::Communicator>>& cut_over, bool receives) {
  std::vector<GatherRow> rows;
  for (const auto& ranks : cut_over) rows.push_back({.ranks = ranks, .receives = {}});
  bool needs = receives;
  for (auto row = rows.rbegin(); row != rows.rend(); ++row) {
    const auto all = row->ranks->exchange(at::full({1}, needs, at::kByte), kReceivers);
    const auto* data = all.const_data_ptr<std::uint8_t>();
    row->receives.assign(data, data + row->ranks->size());
    needs = row->some_receive();
  }
  return rows;
}

/// The course from row to row.
Course course_by_rows(const Entry& entry, const Route& route) {
  Course course{.route = &route, .ranges = {}, .numel = {}};
  auto& ranges = course.ranges;
  if (entry.is_cut_by_unit()) {
    const auto& unit = *entry.unit;
    const auto begins = begins_by_rank(entry);
    const auto range_of = [&](engine::Pieces pieces) {
      const auto from = begins[static_cast<std::size_t>(pieces.first)];
      return Range{from, begins[static_cast<std::size_t>(pieces.first + pieces.count)] - from};
    };
    const auto inner = unit.inner_pieces();
    ranges.push_back(range_of(unit.main_pieces()));
    if (unit.options.outer_sharded_optimizer) {
      auto& numel = course.numel.emplace_back();
      for (int rank = 0; rank < unit.communicators.outer_size(); ++rank) numel.push_back(range_of({inner.first + rank, 1}).size);
      ranges.push_back(range_of(inner));
    }
    auto& numel = course.numel.emplace_back();
    for (int rank = 0; rank < unit.communicators.gather->size(); ++rank) numel.push_back(range_of({rank * inner.count, inner.count}).size);
    ranges.push_back({0, begins.back()});
  }
  if (entry.assembly == nullptr) return course;
  const auto& assembly = *entry.assembly;
  const auto numel = entry.changed ? entry.changed->numel_of_rank : assembly.numel();
  const auto range_of = [&](std::size_t first, std::size_t count) {
    const auto from = numel.begin() + static_cast<std::ptrdiff_t>(first);
    return Range{std::accumulate(numel.begin(), from, std::int64_t{0}),
                 std::accumulate(from, from + static_cast<std::ptrdiff_t>(count), std::int64_t{0})};
  };
  const auto mine = range_of(assembly.rank(), 1);
  if (ranges.empty()) ranges.push_back({0, mine.size});
  for (auto& range : ranges) range.begin += mine.begin;
  std::size_t together = 1;  // ranks whose pieces one rank of the row has
  for (auto row = assembly.rows.rbegin(); row != assembly.rows.rend(); ++row) {
    const auto size = static_cast<std::size_t>((*row)->size());
    const auto first = assembly.rank() / (together * size) * (together * size);
    auto& of_rank = course.numel.emplace_back();
    for (std::size_t rank = 0; rank < size; ++rank) of_rank.push_back(range_of(first + rank * together, together).size);
    together *= size;
    ranges.push_back(range_of(first, together));
  }
  return course;
}

}  // namespace

const Route& Routes::of(const Entry& entry) {
  auto cut_over = rows_over_which_is_cut(entry);
  if (const auto known = std::ranges::find(routes_, cut_over, [](const auto& route) { return route->cut_over; }); known != routes_.end()) {
    return **known;
  }
  auto rows = joined_row_of(cut_over, mesh_, receives_);
  const bool is_joined = !rows.empty();
  if (!is_joined) rows = one_after_the_other(cut_over, receives_);
  return *routes_.emplace_back(
      std::make_unique<Route>(Route{.cut_over = std::move(cut_over), .rows = std::move(rows), .is_joined = is_joined}));
}

std::vector<Course> courses_of(std::span<const Entry> entries, Routes& routes) {
  std::vector<Course> courses;
  std::map<const Route*, std::vector<std::size_t>> joined;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i].is_cut()) {
      courses.push_back({.route = nullptr, .ranges = {{0, c10::multiply_integers(entries[i].shape)}}, .numel = {}});
      continue;
    }
    const auto& route = routes.of(entries[i]);
    courses.push_back(course_by_rows(entries[i], route));
    if (route.is_joined) joined[&route].push_back(i);
  }
  for (const auto& route : routes.all()) {  // in the order that all ranks have
    const auto& indices = joined[route.get()];
    if (indices.empty()) continue;
    // A rank does not know how units of other tensor-parallel ranks cut their pieces.
    auto own = at::empty({static_cast<std::int64_t>(indices.size())}, at::kLong);
    for (std::size_t k = 0; k < indices.size(); ++k) own.mutable_data_ptr<std::int64_t>()[k] = courses[indices[k]].ranges.front().size;
    const auto all = route->rows.front().ranks->exchange(own, kSizes).t().contiguous();
    for (std::size_t k = 0; k < indices.size(); ++k) {
      auto& course = courses[indices[k]];
      course.ranges = {course.ranges.front(), course.ranges.back()};
      const auto* numel = all.const_data_ptr<std::int64_t>() + static_cast<std::int64_t>(k) * all.size(1);
      course.numel = {{numel, numel + all.size(1)}};
    }
  }
  return courses;
}

}  // namespace fsdp::weights
