#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/unit.h"

namespace fsdp::paging {

/// How an operator uses the tensors in one of its arguments.
enum class Use : std::uint8_t {
  kShape,  ///< It reads shape, strides, dtype and device only, or returns the tensor itself. The tensors need not be present.
  kRead,
  kWritten,
};

/// The facts about an operator's arguments that its schema states, and some that it does not state.
class OperatorArguments {
 public:
  /// Returns the facts about an operator. They are computed once per thread and operator; the reference is valid as long as the thread
  /// exists.
  static const OperatorArguments& of(const c10::OperatorHandle& op);

  std::size_t size() const { return uses_.size(); }
  Use use(std::size_t argument, at::ArrayRef<c10::IValue> values) const {
    return statistics_.empty() || !updates(argument, values) ? uses_[argument] : Use::kWritten;
  }
  /// True for operators that give the first argument other memory (set_), or that are called before it gets other memory (set_data).
  bool gives_memory() const { return gives_memory_; }
  /// True for operators whose result is placed in the first argument's storage by an offset.
  bool strides_storage() const { return storage_offset_.has_value(); }
  /// For operators that stride storages: moves the offset in `values`, so that it counts from the parameter of `unit` that the first
  /// argument is, or is a view of. (An ordinary parameter begins where its storage does; a paged one lies behind other parameters of its
  /// unit.) Throws Error if the result would leave that parameter, or if the offset may as well have come from storage_offset(), which
  /// counts from the unit's beginning.
  void place_in_parameter(const engine::Unit& unit, c10::IValue* values) const;

 private:
  explicit OperatorArguments(const c10::FunctionSchema& schema);
  /// True if the argument is among the statistics that this call updates.
  bool updates(std::size_t argument, at::ArrayRef<c10::IValue> values) const;

  std::vector<Use> uses_;
  bool gives_memory_ = false;
  std::vector<std::size_t>
      statistics_;  ///< Arguments that the operator writes unless argument `training_` is false, although the schema does not declare it.
  std::optional<std::size_t> training_;
  std::optional<std::size_t> storage_offset_;
};

}  // namespace fsdp::paging
