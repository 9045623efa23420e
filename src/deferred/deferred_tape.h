#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "deferred/deferred_storage.h"

// The tape of deferred_init: recorded operators that can be called again. Each knows the operators whose results it takes.
//
// The tape is not a list but a graph, which the results own. An operator that no living tensor needs is dropped at once, such as a layer's
// default initialisation that the model overwrites. To compute some tensors, only the operators that lead to them are called, so units can
// be made in any order. Two rules make that correct:
//
// [Contents, not storages] An operator refers to the contents of its arguments when it was called, that is, to the operators that had last
// written them. A replay calls the needed operators in the recorded order on memory of its own, so each argument has the same contents
// again.
//
// [Drawn once] When a random operator is recorded, its numbers are drawn and dropped, and the operator keeps the previous state of the
// generator. This needs memory for one tensor at a time. The generator has the same states as with an ordinary constructor at every moment:
// later operators draw the same numbers, and manual_seed in a constructor works. There are two alternatives. The states could be computed
// without recording only by drawing, because generators of the CPU can't be moved to a position. A replay of the whole tape in order would
// hold every unit that is not complete before the last operator; for a GPT that is initialised in a loop over all parameters, that is the
// complete model.
namespace fsdp::deferred {

/// One recorded call of an operator. It refers to older operations only, and does not change once it is recorded.
struct Operation {
  /// A tensor among the arguments.
  struct Input {
    std::optional<DeferredView> deferred;
    at::Tensor value;  ///< Otherwise, a copy of a tensor that had memory. May be undefined.
  };
  /// An argument. `tensors` replace the tensors in `value`, whose type is a tensor, a list, or a list of optional tensors.
  struct Argument {
    c10::IValue value;
    std::vector<Input> tensors;
  };
  /// A storage that the operator has created, and where it is among the results.
  struct Output {
    std::size_t result = 0;   ///< The index of the result.
    std::size_t element = 0;  ///< The index of the tensor in that result, if it is a list.
    std::uint64_t cell = 0;
    std::size_t bytes = 0;
    Geometry geometry;
  };

  explicit Operation(const c10::OperatorHandle& handle);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  c10::OperatorHandle handle;
  std::uint64_t number;  ///< The number of the operation. Later operations have greater numbers.
  std::vector<Argument> arguments;
  std::vector<Output> outputs;
  c10::ScalarType default_dtype;

  bool random = false;
  at::Tensor generator_state;  ///< [Drawn once] Undefined if recorded without drawing.
  std::optional<std::size_t> generator_argument;
};

/// Returns a name such as "aten::normal_" or "aten::add.Tensor".
std::string name_of(const c10::OperatorHandle& op);

/// Returns an argument or result in which each tensor is replaced by fn(tensor).
template <typename Fn>
c10::IValue map_tensors(const c10::IValue& value, const Fn& fn) {
  if (value.isTensor()) return fn(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(fn(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    const auto tensors = value.toOptionalTensorList();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::optional<at::Tensor> tensor = tensors.get(i);
      list.push_back(tensor ? std::optional<at::Tensor>(fn(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

/// Computes the values of tensors without memory, and passes each to `take` as soon as the last operator that wrote to it has run. Views of
/// one storage become views of one storage. Operators that several tensors need are called once. Tensors that share no operator are
/// computed one after the other, so memory is needed for the largest of them only.
void replay(std::span<const DeferredView> wanted, const std::function<void(std::size_t index, const at::Tensor& value)>& take);

/// Returns memory that is not initialised. Large blocks do not come from malloc's heap, where blocks that come and go between the small
/// objects of the tape would leave more and more holes.
c10::Storage fresh_memory(std::size_t bytes);

/// Returns a storage of at least `contents.bytes` bytes that holds the contents in memory.
c10::Storage memory_with(const Contents& contents);

}  // namespace fsdp::deferred
