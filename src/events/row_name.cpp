#include "events/row_name.h"

#include <algorithm>
#include <charconv>

namespace fsdp::events {
namespace {

constexpr std::int64_t kMostRanks = 1 << 20;  // A damaged file may contain any number.

/// Reads a number at the beginning of the text, and removes it.
bool take_number(std::string_view& text, std::int64_t& number) {
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (failed != std::errc()) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}

bool take(std::string_view& text, char expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(1);
  return true;
}

}  // namespace

std::string name_of_row(std::string_view dim, std::span<const std::int64_t> ranks) {
  // A blank would end it.
  std::string name(dim);
  std::replace(name.begin(), name.end(), ' ', '_');
  const auto step = ranks.size() < 2 ? 1 : ranks[1] - ranks[0];
  bool even = ranks.size() > 2 && step > 0;
  for (std::size_t i = 1; i < ranks.size() && even; ++i) even = ranks[i] - ranks[i - 1] == step;
  if (even) {
    name.append(" ").append(std::to_string(ranks.front())).append("-").append(std::to_string(ranks.back()));
    if (step != 1) name.append(":").append(std::to_string(step));
    return name;
  }
  for (const auto rank : ranks) name.append(" ").append(std::to_string(rank));
  return name;
}

std::vector<std::int64_t> ranks_of_row(std::string_view name) {
  std::vector<std::int64_t> ranks;
  name.remove_prefix(std::min(name.find(' '), name.size()));
  std::int64_t first = 0;
  while (take(name, ' ') && take_number(name, first)) {
    std::int64_t last = first;
    std::int64_t step = 1;
    if (take(name, '-') && (!take_number(name, last) || (take(name, ':') && !take_number(name, step)))) break;
    if (step < 1 || (last - first) / step >= kMostRanks) break;
    for (std::int64_t rank = first; rank <= last; rank += step) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace fsdp::events
