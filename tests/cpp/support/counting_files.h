#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "checkpoint/files.h"

namespace fsdp::testing {

/// Counts what is read.
class CountingFiles final : public ckpt::FileSystem {
 public:
  int preads = 0;
  std::int64_t bytes = 0;
  ssize_t pread(int file, void* data, std::size_t length, off_t offset) override {
    const ssize_t count = FileSystem::pread(file, data, length, offset);
    ++preads;
    bytes += std::max<ssize_t>(count, 0);
    return count;
  }
};

}  // namespace fsdp::testing
