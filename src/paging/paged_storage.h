#pragma once

#include <c10/core/StorageImpl.h>

#include <memory>
#include <typeinfo>

#include "engine/engine.h"
#include "engine/unit.h"
#include "paging/paged_model.h"

namespace fsdp::paging {

/// The storage that a unit's parameters view. It has bytes only while the unit is gathered.
class PagedStorage final : public c10::StorageImpl {
 public:
  explicit PagedStorage(c10::Device device);

  /// Returns the storage as a PagedStorage, or null if it is not one.
  static PagedStorage* from(c10::StorageImpl* storage) {
    return typeid(*storage) == typeid(PagedStorage) ? static_cast<PagedStorage*>(storage) : nullptr;
  }

  /// Returns the PagedStorage of a parameter or of a view of one; null for other tensors.
  static PagedStorage* of(const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() ? from(tensor.storage().unsafeGetStorageImpl()) : nullptr;
  }

  /// Call it when the unit is present. From now on, the storage notices the first request for an address to write to. Data that are written
  /// through the address are then written back before the unit is freed. (torch 2.11's storages can't notice such requests.)
  void watch_address();

  engine::Engine* engine = nullptr;  ///< The engine; null once the unit has been destroyed.
  engine::Unit* unit = nullptr;
  std::shared_ptr<PagedModel> model;
};

/// Makes `parameter`, in place, a view of its unit's storage that carries the paged key, and hooks its gradient. The hook keeps the engine
/// alive for as long as the parameter lives.
void page(const at::Tensor& parameter, const std::shared_ptr<engine::Engine>& engine, engine::Unit& unit, std::size_t index);

/// Makes a paged parameter, in place, an ordinary tensor over the memory of `value`, of any dtype, and back. Its hook stays.
void show(const at::Tensor& parameter, const at::Tensor& value);
void hide(const at::Tensor& parameter, const engine::Unit& unit, std::size_t index);

/// Makes `parameter` an ordinary tensor with the given value again.
void unpage(const at::Tensor& parameter, const at::Tensor& value);

}  // namespace fsdp::paging
