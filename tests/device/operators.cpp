#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "graph.h"
#include "host_clock.h"
#include "memory.h"
#include "pinned.h"
#include "streams.h"

// The operators that the fallback cannot do: those that make tensors and views, and those between device and host.
namespace sim {

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, int device) {
  const c10::DeviceGuard guard(sim::device(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

at::Tensor view_of(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride, std::int64_t offset) {
  auto view =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return view;
}

namespace {

int device_or_current(std::optional<c10::Device> device) { return device ? index_of(*device) : current_device(); }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(sim::device(device_or_current(device)));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided_operator(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                  std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  return empty_strided(size, stride, c10::dtype_or_default(dtype), device_or_current(device));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<std::int64_t> offset) {
  return view_of(self, size, stride, offset.value_or(self.storage_offset()));
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  const auto inferred = at::infer_size_dv(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return view_of(self, inferred, *stride, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return view_of(self, size, stride, self.storage_offset());
}

void grow(const at::Tensor& self, std::size_t bytes) {
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  grow(self, at::detail::computeStorageNbytesContiguous(size, self.itemsize(), static_cast<std::size_t>(self.storage_offset())));
  return self;
}

at::Tensor& set_storage_with_offset(at::Tensor& self, at::Storage source, std::int64_t offset, at::IntArrayRef size,
                                    at::IntArrayRef stride) {
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(std::move(source));
  const auto contiguous = c10::contiguous_strides(size);
  if (stride.size() != size.size()) stride = contiguous;
  impl.set_sizes_and_strides(size, stride, offset);
  grow(self, at::detail::computeStorageNbytes(size, stride, self.itemsize(), static_cast<std::size_t>(offset)));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<std::int64_t>(source.nbytes() / self.itemsize());
  return set_storage_with_offset(self, std::move(source), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_with_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  auto memory = allocator().allocate_on(self.device().index(), 0);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, std::move(memory), &allocator(), true);
  return set_storage_with_offset(self, c10::Storage(std::move(storage)), 0, {0}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

at::Scalar local_scalar_dense(const at::Tensor& self) {
  std::vector<Range> ranges;
  add_ranges(ranges, self, /*write=*/false);
  const int device = self.device().index();
  host_waits(device, launch(current_stream(device), "aten::_local_scalar_dense", ranges).clock, "item");
  return at::_local_scalar_dense(on_cpu(self));
}

/// And at each replay, where it is captured.
void copy_now(const at::Tensor& from, const at::Tensor& to) {
  const auto copy = [from = on_cpu(from), to = on_cpu(to)] { to.copy_(from); };
  copy();
  record_in_graph(current_stream((to.device().is_cpu() ? from : to).device().index()), copy);
}

at::Tensor copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  std::vector<Range> ranges;
  add_ranges(ranges, from, /*write=*/false);
  add_ranges(ranges, to, /*write=*/true);
  launch(current_stream(to.device().index()), "aten::copy_", ranges);
  copy_now(from, to);
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool to_host = to.device().is_cpu();
  if (to_host == from.device().is_cpu()) return copy_between_devices(from, to);
  const at::Tensor& host = to_host ? to : from;
  const int device = (to_host ? from : to).device().index();
  std::vector<Range> ranges;
  add_ranges(ranges, to_host ? from : to, /*write=*/!to_host);

  Launched launched;
  {
    const Lock lock;
    const bool is_pinned = host.numel() > 0 && pinned_memory().contains(host.const_data_ptr());
    if (is_pinned) {  // Other streams may copy from and to it.
      add_ranges(ranges, host, /*write=*/to_host);
      pinned_memory().use(ranges.back());
    }
    launched = launch(current_stream(device), to_host ? "aten::copy_ to the host" : "aten::copy_ from the host", ranges);
    copy_now(from, to);
    // torch copies strided memory through a block of its own, for which it waits.
    if (non_blocking && is_pinned && host.is_non_overlapping_and_dense()) {
      pinned_memory().begin_copy(ranges.back(), launched.access);
      return to;
    }
  }
  const char* const blocking = to_host ? "blocking copy to the host" : "blocking copy from the host";
  host_waits(device, launched.clock, non_blocking ? "copy that is not of pinned memory" : blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

/// torch's list of dense backends lacks this one, and Module::to() replaces the data of parameters only if this is true.
bool has_compatible_shallow_copy_type(const at::Tensor&, const at::Tensor&) { return true; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided_operator);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_with_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

}  // namespace
}  // namespace sim
