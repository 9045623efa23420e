#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/unit.h"

namespace fsdp::paging {

/// What an operator needs of the tensors in one of its arguments.
enum class Use : std::uint8_t {
  kShape,  ///< Shape, strides, dtype and device; or it hands the tensor itself on. They need not be present.
  kRead,
  kWritten,
};

/// What is known of an operator's arguments: from its schema, and beyond it.
class OperatorArguments {
 public:
  /// Found once per thread and operator; the reference stays valid for as long as the thread lives.
  static const OperatorArguments& of(const c10::OperatorHandle& op);

  std::size_t size() const { return uses_.size(); }
  Use use(std::size_t argument, at::ArrayRef<c10::IValue> values) const {
    return statistics_.empty() || !updates(argument, values) ? uses_[argument] : Use::kWritten;
  }
  /// True for operators that come before the first argument gets other memory (set_data), or that give it (set_).
  bool gives_memory() const { return gives_memory_; }
  /// True for operators that place their result in the first argument's storage by an offset.
  bool strides_storage() const { return storage_offset_.has_value(); }
  /// An ordinary parameter begins where its storage does; a paged one lies behind others of its unit. For operators that stride storages:
  /// moves the offset in `values` to the parameter of `unit` that the first argument is, or is a view of. Throws Error if the result would
  /// leave that parameter, or if the offset may as well have come from storage_offset(), which counts from the unit's beginning.
  void place_in_parameter(const engine::Unit& unit, c10::IValue* values) const;

 private:
  explicit OperatorArguments(const c10::FunctionSchema& schema);
  /// The argument is among the statistics that this call updates.
  bool updates(std::size_t argument, at::ArrayRef<c10::IValue> values) const;

  std::vector<Use> uses_;
  bool gives_memory_ = false;
  std::vector<std::size_t> statistics_;  ///< Written, although the schema does not say so, unless argument `training_` is false.
  std::optional<std::size_t> training_;
  std::optional<std::size_t> storage_offset_;
};

}  // namespace fsdp::paging
