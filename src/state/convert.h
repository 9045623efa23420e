#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::state {

struct ConvertOptions {
  /// The prefix of the model's names in DCP, which they do not have in safetensors. Items of a DCP checkpoint without it are not converted.
  std::string prefix = "model.";
  /// The dtype to which floating-point tensors are converted, except those with two numbers in a byte (float4_e2m1fn_x2). By default, they
  /// keep theirs.
  std::optional<at::ScalarType> dtype = {};
  /// The largest size of a file, unless a single tensor is larger.
  std::int64_t most_bytes_per_file = std::int64_t{5} << 30;
};

struct Converted {
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;     ///< The bytes of the tensors in the new files.
  std::int64_t left_out = 0;  ///< The number of items whose names do not begin with the prefix, or that are not tensors.
  /// Tensors with the prefix that cannot be read, and are left out as well, as "'name': why".
  std::vector<std::string> unreadable = {};
};

/// Writes the tensors of a DCP checkpoint as safetensors, or the reverse, into the new folder `to`, which appears complete or not at all.
/// It runs in one process and takes a few MiB of memory. Throws Error.
Converted convert(const std::string& from, const std::string& to, const ConvertOptions& options = {});

}  // namespace fsdp::state
