#pragma once

#include <c10/core/StorageImpl.h>

#include <memory>
#include <typeinfo>

#include "engine/engine.h"
#include "engine/unit.h"
#include "paging/paged_model.h"

namespace fsdp::paging {

/// The storage that a unit's parameters view. Has bytes only while the unit is gathered.
class PagedStorage final : public c10::StorageImpl {
 public:
  explicit PagedStorage(c10::Device device);

  /// The storage's own type if it is one, else null.
  static PagedStorage* from(c10::StorageImpl* storage) {
    return typeid(*storage) == typeid(PagedStorage) ? static_cast<PagedStorage*>(storage) : nullptr;
  }

  /// The storage of a parameter, or of a view of one, if it is one, else null.
  static PagedStorage* of(const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() ? from(tensor.storage().unsafeGetStorageImpl()) : nullptr;
  }

  /// The unit is present: from now on, until somebody has asked for an address to write to, the storage notices that, and what is written
  /// through that address is written back before the unit is freed. (torch 2.11's storages can't notice.)
  void watch_address();

  engine::Engine* engine = nullptr;  ///< Null once the unit is gone.
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
