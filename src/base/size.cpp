#include "fsdp/size.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "fsdp/error.h"

namespace fsdp {
namespace {

constexpr std::pair<std::string_view, std::int64_t> kSizeUnits[] = {
    {"B", 1},
    {"kB", 1'000},
    {"KB", 1'000},
    {"MB", 1'000'000},
    {"GB", 1'000'000'000},
    {"TB", 1'000'000'000'000},
    {"KiB", std::int64_t{1} << 10},
    {"MiB", std::int64_t{1} << 20},
    {"GiB", std::int64_t{1} << 30},
    {"TiB", std::int64_t{1} << 40},
};

}  // namespace

std::int64_t parse_size(std::string_view text) {
  const auto* const end = text.data() + text.size();
  long double number = 0;  // has all digits of a 64-bit integer
  const auto [rest, failure] = std::from_chars(text.data(), end, number);
  std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  unit.remove_prefix(std::min(unit.find_first_not_of(' '), unit.size()));
  for (const auto& [name, factor] : kSizeUnits) {
    if (failure != std::errc() || unit != name || !(number >= 0)) continue;
    const auto bytes = std::round(number * static_cast<long double>(factor));
    if (bytes <= static_cast<long double>(std::numeric_limits<std::int64_t>::max())) return static_cast<std::int64_t>(bytes);
  }
  throw Error("'" + std::string(text) +
              "' is no size: write a number and a unit, as in 80GB or 128MiB. KB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB "
              "are powers of 1024, and B is a byte");
}

}  // namespace fsdp
