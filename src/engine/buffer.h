#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "memory/slot_pool.h"

namespace fsdp::engine {

/// A buffer over a unit's sub-buffers (or the trainable ones among them, which come first), whose memory comes and goes.
struct Buffer {
  c10::Storage storage;
  std::vector<at::Tensor> parts;  ///< Per sub-buffer, 1-D views of `storage`.
  std::int64_t bytes = 0;
  memory::Slot slot;

  bool live() const { return static_cast<bool>(slot); }
  void acquire(memory::SlotPool& pool, memory::Kind kind);
  void release();
};

/// The size and dtype of a sub-buffer's part in a buffer. Without a dtype, the buffer holds nothing of the sub-buffer, and its part is
/// undefined.
struct Part {
  std::optional<at::ScalarType> dtype;
  std::int64_t numel = 0;
};

/// Gives an empty buffer its storage, and makes a part in it for each of `sub_buffers` sub-buffers. The parts lie one behind the other,
/// each at a multiple of layout::kAlignment bytes. `part_of(k)` describes the part of sub-buffer k.
void lay_out(Buffer& buffer, c10::Storage storage, std::size_t sub_buffers, const std::function<Part(std::size_t)>& part_of);

/// Returns a tensor over the storage, which may not have memory yet.
at::Tensor view_of(const c10::Storage& storage, at::ScalarType dtype, std::int64_t byte_offset, at::IntArrayRef shape);

}  // namespace fsdp::engine
