#include "optim/dynamic_map.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

namespace fsdp::optim {

DynamicMap::DynamicMap(bool is_signed)
    : dropped_(is_signed ? 23 - 6 : 23 - 7),
      first_((127 - kBinades) << (23 - dropped_)),
      last_(kBinades << (23 - dropped_)),
      negative_(is_signed ? last_ + 1 : 0) {
  constexpr int kDecades = 7;
  std::vector<double> values = {0, 1};
  for (int decade = 0; decade < kDecades; ++decade) {
    // The middles of equal parts of [0.1, 1], scaled.
    const int parts = 1 << (is_signed ? decade : decade + 1);
    const double scale = std::pow(10.0, decade - (kDecades - 1));
    for (int part = 0; part < parts; ++part) {
      const double middle = 0.1 + 0.9 * (part + 0.5) / parts;
      values.push_back(scale * middle);
      if (is_signed) values.push_back(-scale * middle);
    }
  }
  std::sort(values.begin(), values.end());
  for (std::size_t code = 0; code < std::size(values_); ++code) values_[code] = static_cast<float>(values[code]);

  for (std::size_t code = 0; code + 1 < std::size(values_); ++code) {
    // Exact in double; rounded down, so that a float is beyond it if and only if it is beyond the middle.
    const double middle = (static_cast<double>(values_[code]) + static_cast<double>(values_[code + 1])) / 2;
    auto bound = static_cast<float>(middle);
    if (static_cast<double>(bound) > middle) bound = std::nextafter(bound, -std::numeric_limits<float>::infinity());
    upper_[code] = bound;
  }
  upper_[std::size(upper_) - 1] = std::numeric_limits<float>::infinity();

  const auto nearest = [&](float x) {
    return static_cast<std::int32_t>(std::lower_bound(std::begin(upper_), std::end(upper_), x) - std::begin(upper_));
  };
  for (std::int32_t bucket = 0; bucket <= last_; ++bucket) {
    const std::int32_t least = (first_ + bucket) << dropped_;
    const std::int32_t greatest = least | ((1 << dropped_) - 1);
    lowest_[static_cast<std::size_t>(bucket)] = nearest(std::bit_cast<float>(least));
    if (is_signed) lowest_[static_cast<std::size_t>(negative_ + bucket)] = nearest(-std::bit_cast<float>(greatest));
  }
}

}  // namespace fsdp::optim
