#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

namespace fsdp {

/// The dtype of integers as large as an element of this many bytes. Elements of 16 bytes (complex) count as two of eight.
inline at::ScalarType integer_dtype_of(std::size_t bytes) {
  switch (bytes) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

}  // namespace fsdp
