#include "deferred/deferred_storage.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "deferred/deferred_tape.h"

namespace fsdp::deferred {
namespace {

constexpr const char* kNoMemory =
    "this tensor was made inside of fsdp::deferred_init and has no memory: only the operators that give its value were recorded. Read it "
    "by operators (item() works); fill it by a pointer before any operator has taken it, as torch::tensor does; or make it before "
    "deferred_init, and copy it in";

/// Lets a storage get memory when code asks for its address to write there. torch 2.11's storages can't do this, and refuse.
template <typename Storage>
concept CanGetMemoryLate = requires(Storage& storage) {
  storage.clear_materializer();
};

/// Every tensor with elements needs an address that isn't null, or torch refuses before it asks for one to write to.
char no_memory;
void* const kAddress = CanGetMemoryLate<c10::StorageImpl> ? &no_memory : nullptr;

c10::DataPtr borrowed(void* data) { return {data, c10::Device(c10::kMeta)}; }

std::uint64_t next_cell() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

}  // namespace

Geometry Geometry::of(const at::Tensor& tensor) {
  Geometry geometry;
  geometry.dtype = tensor.scalar_type();
  geometry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  geometry.strides.assign(tensor.strides().begin(), tensor.strides().end());
  geometry.offset = tensor.storage_offset();
  geometry.conjugate = tensor.is_conj();
  geometry.negative = tensor.is_neg();
  geometry.wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  return geometry;
}

at::Tensor Geometry::view(const c10::Storage& storage) const {
  const auto options = at::TensorOptions().dtype(dtype).device(storage.device());
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
  impl->set_sizes_and_strides(sizes, strides, offset);
  if (wrapped_number) impl->set_wrapped_number(true);
  at::Tensor tensor(std::move(impl));
  if (conjugate) tensor._set_conj(true);
  if (negative) tensor._set_neg(true);
  return tensor;
}

DeferredStorage::DeferredStorage(std::size_t bytes, std::shared_ptr<Operation> writer, std::shared_ptr<DeferredSession> session,
                                 bool pristine)
    : StorageImpl(use_byte_size_t(), static_cast<std::int64_t>(bytes), borrowed(kAddress), c10::GetAllocator(c10::kMeta),
                  /*resizable=*/true),
      cell_(next_cell()),
      writer_(std::move(writer)),
      session_(std::move(session)) {
  if (pristine) {
    [](auto& storage) {
      if constexpr (CanGetMemoryLate<c10::StorageImpl>) storage.set_materializer(&give_memory);
    }(*this);
  } else {
    lock();
  }
}

void DeferredStorage::lock() {
  [](auto& storage) {
    if constexpr (CanGetMemoryLate<c10::StorageImpl>) {
      if (storage.has_materializer()) storage.clear_materializer();
    }
  }(*this);
  memory::refuse_address<c10::StorageImpl>(*this, kNoMemory);
}

void DeferredStorage::set_memory(c10::Storage memory) {
  memory_ = std::move(memory);
  writer_ = nullptr;
}

void DeferredStorage::give_memory(c10::StorageImpl* storage) {
  auto* self = static_cast<DeferredStorage*>(storage);
  self->set_memory(memory_with(self->contents()));
  [](auto& storage) {
    if constexpr (CanGetMemoryLate<c10::StorageImpl>) storage.set_data_ptr_no_materialize(borrowed(storage.memory_.mutable_data()));
  }(*self);
}

void become(const at::Tensor& tensor, const at::Tensor& value) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->shallow_copy_from(value.getIntrusivePtr());
  // Its gradient accumulator expects a gradient on the meta device.
  if (auto* autograd = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard lock(autograd->mutex_);
    autograd->grad_accumulator_.reset();
  }
}

}  // namespace fsdp::deferred
