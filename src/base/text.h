#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// Texts of messages. Numbers have the same form under every global locale of the program: 1024.5, not 1.024,5.

/// The text of an item in joined(), unless the caller gives another one.
struct OwnText {
  const std::string& operator()(const std::string& text) const { return text; }
  std::string operator()(std::int64_t number) const { return std::to_string(number); }
};

/// The texts of items, with `between` between two of them: "a, b, c".
template <typename Items, typename Text = OwnText>
std::string joined(const Items& items, std::string_view between = ", ", const Text& text = {}) {
  std::string all;
  bool first = true;
  for (const auto& item : items) {
    if (!first) all += between;
    all += text(item);
    first = false;
  }
  return all;
}

/// "[2, 3]": a shape, or a list of ranks.
template <typename Items>
std::string in_brackets(const Items& items) {
  return std::string("[").append(joined(items)).append("]");
}

/// "a, b and 2 more": at most so many names.
std::string first_names(const std::vector<std::string>& names, std::size_t most);

/// "'blocks.0'"
inline std::string in_quotes(std::string_view name) { return std::string("'").append(name).append("'"); }

/// " of 'blocks.0'", or " of the root unit"; nothing for "" and what is no unit, "(buffers)" for example. `word`: "unit ", for texts that
/// do not speak of units otherwise.
std::string of_unit(std::string_view unit, std::string_view word = "");

/// "rank 1", "ranks 0 and 2-7"; of very many, the first ones.
std::string names_of_ranks(std::vector<std::int64_t> ranks);

/// A number with so many decimals, as "%.2f" gives it under the classic locale.
std::string with_decimals(double value, int decimals);

/// The shortest text from which the same number is read.
std::string shortest(double value);

/// A size in the largest binary unit that it fills: "512 B", "3.74 GiB". For tables.
std::string size_text(std::int64_t bytes);

/// The exact number, and from 1 MiB on also its size_text(): "1024 bytes", "80000000000 bytes (74.51 GiB)". For messages.
std::string bytes_text(std::int64_t bytes);

/// Columns as wide as their widest entries. The first one is text, the next `numbers` stand at the right, and the others are text.
std::string table(const std::vector<std::vector<std::string>>& rows, std::size_t numbers, std::string_view indent = "");

}  // namespace fsdp
