#include "base/text.h"

#include <algorithm>
#include <array>
#include <charconv>

namespace fsdp {

std::string first_names(const std::vector<std::string>& names, std::size_t most) {
  if (names.size() <= most) return joined(names);
  const std::vector<std::string> first(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(most));
  return joined(first) + " and " + std::to_string(names.size() - most) + " more";
}

std::string of_unit(std::string_view unit, std::string_view word) {
  if (unit == "(root)") return " of the root unit";
  if (unit.empty() || unit.front() == '(') return "";
  return std::string(" of ").append(word).append(in_quotes(unit));
}

std::string names_of_ranks(std::vector<std::int64_t> ranks) {
  constexpr std::size_t kMostRuns = 8;
  std::sort(ranks.begin(), ranks.end());
  std::vector<std::string> runs;
  std::size_t i = 0;
  for (; i < ranks.size() && runs.size() < kMostRuns; ++i) {
    const auto first = ranks[i];
    runs.push_back(std::to_string(first));
    if (i + 2 >= ranks.size() || ranks[i + 2] != first + 2) continue;  // "0 and 1", but "0-2"
    while (i + 1 < ranks.size() && ranks[i + 1] == ranks[i] + 1) ++i;
    runs.back().append(1, '-').append(std::to_string(ranks[i]));
  }
  if (i < ranks.size()) runs.push_back(std::to_string(ranks.size() - i) + " more");
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t k = 0; k < runs.size(); ++k) text += (k == 0 ? "" : k + 1 == runs.size() ? " and " : ", ") + runs[k];
  return text;
}

std::string with_decimals(double value, int decimals) {
  std::array<char, 400> text{};  // The greatest double has 309 digits.
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed, decimals).ptr;
  return {text.data(), end};
}

std::string shortest(double value) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  return {digits.data(), end};
}

std::string size_text(std::int64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return with_decimals(value, unit == 0 ? 0 : 2) + " " + kUnits[unit];
}

std::string bytes_text(std::int64_t bytes) {
  const auto text = std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  return bytes < (std::int64_t{1} << 20) ? text : text + " (" + size_text(bytes) + ")";
}

std::string table(const std::vector<std::vector<std::string>>& rows, std::size_t numbers, std::string_view indent) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line(indent);
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string blanks(widths[c] - row[c].size(), ' ');
      line += (c == 0 ? "" : "  ") + (c == 0 || c > numbers ? row[c] + blanks : blanks + row[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace fsdp
