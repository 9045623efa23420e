#include "engine/buffer.h"

#include <ATen/ATen.h>

#include <utility>

#include "layout/unit_layout.h"
#include "memory/slot_storage.h"

namespace fsdp::engine {
namespace {

std::int64_t itemsize_of(at::ScalarType dtype) { return static_cast<std::int64_t>(c10::elementSize(dtype)); }

std::int64_t round_up(std::int64_t bytes) { return (bytes + layout::kAlignment - 1) / layout::kAlignment * layout::kAlignment; }

}  // namespace

void Buffer::acquire(memory::SlotPool& pool, memory::Kind kind) {
  if (bytes == 0 || live()) return;
  slot = pool.acquire(bytes, kind);
  memory::attach(*storage.unsafeGetStorageImpl(), slot);
}

void Buffer::release() {
  if (!live()) return;
  memory::detach(*storage.unsafeGetStorageImpl());
  slot.release();
}

void lay_out(Buffer& buffer, c10::Storage storage, std::size_t sub_buffers, const std::function<Part(std::size_t)>& part_of) {
  buffer.storage = std::move(storage);
  for (std::size_t k = 0; k < sub_buffers; ++k) {
    const Part part = part_of(k);
    buffer.parts.push_back(part.dtype ? view_of(buffer.storage, *part.dtype, buffer.bytes, {part.numel}) : at::Tensor());
    if (part.dtype) buffer.bytes += round_up(part.numel * itemsize_of(*part.dtype));
  }
}

at::Tensor view_of(const c10::Storage& storage, at::ScalarType dtype, std::int64_t byte_offset, at::IntArrayRef shape) {
  const auto options = at::TensorOptions().dtype(dtype).device(storage.device());
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
  impl->set_sizes_contiguous(shape);
  impl->set_storage_offset(byte_offset / itemsize_of(dtype));
  return at::Tensor(std::move(impl));
}

}  // namespace fsdp::engine
