#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include "memory/slot_pool.h"

namespace fsdp::memory {

/// Whether a storage that refuses to return its address can be made to return it again. This is not possible with torch 2.11. With that
/// version, a storage without memory has the address null: data_ptr<T>() throws torch's error, and data_ptr() returns null.
template <typename Storage>
concept CanRefuseForAWhile = requires(Storage& storage) {
  storage.clear_data_ptr_access_error_msg_();
};

template <typename Storage>
void tell_address(Storage& storage) {
  if constexpr (CanRefuseForAWhile<Storage>) storage.clear_data_ptr_access_error_msg_();
}

template <typename Storage>
void refuse_address(Storage& storage, const char* reason) {
  if constexpr (CanRefuseForAWhile<Storage>) storage.release_data_and_set_meta_custom_data_ptr_error_msg_(reason);
}

/// Lends bytes to a storage, so that tensors that view it have memory. The tensors are created once and keep their identity while the
/// memory changes. The storage does not own the bytes: detach before they are released.
inline void attach(c10::StorageImpl& storage, void* data, std::int64_t bytes) {
  tell_address(storage);
  storage.set_data_ptr_noswap(c10::DataPtr(data, storage.device()));
  storage.set_nbytes(static_cast<std::size_t>(bytes));
}

inline void attach(c10::StorageImpl& storage, const Slot& slot) { attach(storage, slot.data(), slot.bytes()); }

/// Takes the bytes away from the storage.
inline void detach(c10::StorageImpl& storage) {
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  storage.set_nbytes(static_cast<std::size_t>(0));
}

/// Takes the bytes away; code that asks for the address of the data gets an error with the text `reason` instead of a null pointer.
inline void detach(c10::StorageImpl& storage, const char* reason) {
  detach(storage);
  refuse_address(storage, reason);
}

/// Does so for a storage that never gets bytes again, with any version of torch. (To a kernel, a null pointer of a GPU is an address like
/// others: it ends the whole process's use of that GPU.)
inline void detach_for_good(c10::StorageImpl& storage, const char* reason) {
  detach(storage);
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(reason);
}

/// Returns a storage without bytes, for attach.
inline c10::Storage empty_storage(c10::Device device) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
                                                            c10::GetAllocator(device.type()), /*resizable=*/false));
}

}  // namespace fsdp::memory
