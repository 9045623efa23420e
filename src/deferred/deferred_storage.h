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

/// What a storage without memory holds: what `writer`, the last operator that wrote to it, left there. Without a writer it holds nothing
/// that is defined, as what torch::empty gives.
struct Contents {
  std::uint64_t cell = 0;  ///< The storage's number. What its writers leave follows each other in the same memory.
  std::size_t bytes = 0;
  std::shared_ptr<Operation> writer;
};

/// How a tensor lies in its storage.
struct Geometry {
  at::ScalarType dtype = at::kFloat;
  c10::DimVector sizes;
  c10::DimVector strides;
  std::int64_t offset = 0;
  bool conjugate = false;
  bool negative = false;
  bool wrapped_number = false;  ///< A number that an operator took for a tensor: it has less say in the result's dtype.

  static Geometry of(const at::Tensor& tensor);
  /// The tensor of this geometry in a storage.
  at::Tensor view(const c10::Storage& storage) const;
  bool operator==(const Geometry&) const = default;
};

/// A tensor without memory, as it was at some moment.
struct DeferredView {
  Contents contents;
  Geometry geometry;
};

/// What one call of deferred_init made.
struct DeferredSession {
  bool draw = true;                 ///< DeferredInitOptions::draw.
  std::optional<c10::Device> home;  ///< Set once the model has its values: what it keeps besides parameters and buffers follows when used.
};

/// The storage of the tensors that deferred_init made: on the meta device, without memory, but knowing which operators give its contents.
///
/// Its address may be asked for until an operator takes it: torch::tensor, and constructors that fill tables by hand, write through a
/// pointer to what torch::empty or torch::zeros has just given them. It then gets memory. Later, the address is an error with a text.
class DeferredStorage final : public c10::StorageImpl {
 public:
  /// `writer` may be null. `pristine`: the address may be asked for.
  DeferredStorage(std::size_t bytes, std::shared_ptr<Operation> writer, std::shared_ptr<DeferredSession> session, bool pristine);

  /// The storage's own type if it is one, else null.
  static DeferredStorage* from(c10::StorageImpl* storage) {
    return typeid(*storage) == typeid(DeferredStorage) ? static_cast<DeferredStorage*>(storage) : nullptr;
  }
  static DeferredStorage* of(const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() ? from(tensor.storage().unsafeGetStorageImpl()) : nullptr;
  }

  Contents contents() const { return {cell_, nbytes(), writer_}; }
  const std::shared_ptr<DeferredSession>& session() const { return session_; }
  void written_by(std::shared_ptr<Operation> writer) { writer_ = std::move(writer); }

  /// An operator takes it: from now on the address is an error.
  void lock();
  /// While an operator runs on the meta device, which compares addresses but uses none.
  void unlock() { memory::tell_address<c10::StorageImpl>(*this); }

  /// Its contents in memory, once somebody has asked for the address or they have been needed as they are: what the tensors
  /// that are still on the meta device become. Else null.
  const c10::Storage& memory() const { return memory_; }
  void set_memory(c10::Storage memory);

 private:
  static void give_memory(c10::StorageImpl* storage);

  const std::uint64_t cell_;
  std::shared_ptr<Operation> writer_;
  std::shared_ptr<DeferredSession> session_;
  c10::Storage memory_;
};

/// Makes `tensor` the given value, in place: who holds it sees it change. Other than set_data, between devices.
void become(const at::Tensor& tensor, const at::Tensor& value);

}  // namespace fsdp::deferred
