#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/DimVector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <typeinfo>

#include "memory/slot_storage.h"

namespace fsdp::deferred {

struct Operation;

/// The contents of a storage without memory, that is, the values of `writer`, the last operator that wrote to it. Without a writer the
/// values are undefined, as those of torch::empty.
struct Contents {
  std::uint64_t cell =
      0;  ///< The number of the storage. Operators that write to one storage write to the same memory, one after the other.
  std::size_t bytes = 0;
  std::shared_ptr<Operation> writer;
};

/// The geometry of a tensor in its storage.
struct Geometry {
  at::ScalarType dtype = at::kFloat;
  c10::DimVector sizes;
  c10::DimVector strides;
  std::int64_t offset = 0;
  bool conjugate = false;
  bool negative = false;
  bool wrapped_number = false;  ///< The tensor is a number that an operator has wrapped. Its dtype counts less for the dtype of results.

  static Geometry of(const at::Tensor& tensor);
  /// Returns the tensor of this geometry in a storage.
  at::Tensor view(const c10::Storage& storage) const;
  bool operator==(const Geometry&) const = default;
};

/// A tensor without memory, with the contents that it had at some moment.
struct DeferredView {
  Contents contents;
  Geometry geometry;
};

/// The tensors that one call of deferred_init has made.
struct DeferredSession {
  bool draw = true;                 ///< DeferredInitOptions::draw.
  std::optional<c10::Device> home;  ///< The device of the model, once its parameters and buffers have values. Other tensors that it keeps
                                    ///< get memory on this device when they are used.
};

/// The storage of tensors that deferred_init has made. It is on the meta device and has no memory, but knows which operators compute its
/// contents.
///
/// Until an operator takes the storage, code may ask for its address, and the storage then gets memory. torch::tensor does this, and so do
/// constructors that fill the result of torch::empty or torch::zeros through a pointer. Later, asking for the address is an Error.
class DeferredStorage final : public c10::StorageImpl {
 public:
  /// `writer` may be null. `pristine`: whether code may ask for the address.
  DeferredStorage(std::size_t bytes, std::shared_ptr<Operation> writer, std::shared_ptr<DeferredSession> session, bool pristine);

  /// Returns the storage as a DeferredStorage, or null if it is not one.
  static DeferredStorage* from(c10::StorageImpl* storage) {
    return typeid(*storage) == typeid(DeferredStorage) ? static_cast<DeferredStorage*>(storage) : nullptr;
  }
  static DeferredStorage* of(const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() ? from(tensor.storage().unsafeGetStorageImpl()) : nullptr;
  }

  Contents contents() const { return {cell_, nbytes(), writer_}; }
  const std::shared_ptr<DeferredSession>& session() const { return session_; }
  void written_by(std::shared_ptr<Operation> writer) { writer_ = std::move(writer); }

  /// Call it when an operator has taken the storage. From now on, asking for its address is an Error.
  void lock();
  /// Allows to ask for the address while an operator runs on the meta device, which compares addresses but does not read or write there.
  void unlock() { memory::tell_address<c10::StorageImpl>(*this); }

  /// Its contents in memory, once code has asked for the address or needed the values. The tensors that are still on the meta device will
  /// then become views of this memory. Null otherwise.
  const c10::Storage& memory() const { return memory_; }
  void set_memory(c10::Storage memory);

 private:
  static void give_memory(c10::StorageImpl* storage);

  const std::uint64_t cell_;
  std::shared_ptr<Operation> writer_;
  std::shared_ptr<DeferredSession> session_;
  c10::Storage memory_;
};

/// Gives `tensor` this value, in place: code that holds the tensor sees the change. Unlike set_data, it works between devices.
void become(const at::Tensor& tensor, const at::Tensor& value);

}  // namespace fsdp::deferred
