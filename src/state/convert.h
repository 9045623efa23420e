#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::state {

struct ConvertOptions {
  /// What the model's names begin with in DCP, and not in safetensors. Of DCP, nothing else is converted.
  std::string prefix = "model.";
  /// Of floating-point tensors, but for those with two numbers in a byte (float4_e2m1fn_x2); by default as they are.
  std::optional<at::ScalarType> dtype = {};
  /// A file takes tensors up to this size, or one larger one.
  std::int64_t most_bytes_per_file = std::int64_t{5} << 30;
};

struct Converted {
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;     ///< Of tensors, as they are in the new files.
  std::int64_t left_out = 0;  ///< Items whose names do not begin with the prefix, or that are no tensors.
  /// Tensors below the prefix that cannot be read, and are left out as well: "'name': why".
  std::vector<std::string> unreadable = {};
};

/// Writes the tensors of a DCP checkpoint as safetensors, or the reverse, into the new folder `to`, which appears complete or not at all.
/// In one process and a few MiB of memory. Throws Error.
Converted convert(const std::string& from, const std::string& to, const ConvertOptions& options = {});

}  // namespace fsdp::state
