#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::state {

struct DiffOptions {
  /// Names that begin with one of these are not compared.
  std::vector<std::string> ignored;
};

struct Difference {
  std::int64_t same = 0;           ///< The number of items that are equal in all bits.
  std::int64_t ignored = 0;        ///< The number of names in both checkpoints that were ignored.
  std::vector<std::string> lines;  ///< One for each item that differs.
};

/// Compares two checkpoints (DCP's or safetensors, whose names get "model." in front) in a few MiB of memory: names, shapes, dtypes and
/// values. However they are divided among files makes no difference. Throws Error if one cannot be read.
Difference diff(const std::string& a, const std::string& b, const DiffOptions& options = {});

}  // namespace fsdp::state
