#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::testing {

/// The dynamic map of 8-bit optimizers as bitsandbytes describes it, by the book: a sorted table, searched whole.
struct BruteForceMap {
  explicit BruteForceMap(bool is_signed) {
    for (int i = 0; i < 7; ++i) {
      // linspace(0.1, 1, parts + 1), and the means of neighbours.
      const int parts = static_cast<int>(std::pow(2, is_signed ? i : i + 1));
      for (int k = 0; k < parts; ++k) {
        const double low = 0.1 + 0.9 * k / parts;
        const double high = 0.1 + 0.9 * (k + 1) / parts;
        const double mean = (low + high) / 2 * std::pow(10.0, i - 6);
        values.push_back(static_cast<float>(mean));
        if (is_signed) values.push_back(static_cast<float>(-mean));
      }
    }
    values.push_back(0);
    values.push_back(1);
    std::sort(values.begin(), values.end());
  }

  /// Of equally near ones the lowest.
  std::uint8_t nearest(float x) const {
    std::size_t best = 0;
    for (std::size_t code = 1; code < values.size(); ++code) {
      if (std::abs(static_cast<double>(values[code]) - x) < std::abs(static_cast<double>(values[best]) - x)) best = code;
    }
    return static_cast<std::uint8_t>(best);
  }

  std::vector<float> values;
};

}  // namespace fsdp::testing
