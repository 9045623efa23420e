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

// The tape of deferred_init: operators to be called again, each knowing those whose results it takes.
//
// It is not a list but a graph that its results hold: what no living tensor needs is dropped at once (the default initialisation of a
// layer, when the model initialises it anew). The values of some tensors come from the operators that lead to them and no others, so
// units can be made in any order. Two things make that right:
//
// [Contents, not storages] An operator refers to what its arguments held when it was called, that is, to the operator that last wrote
//     there. A replay runs what is needed in the recorded order on memory of its own: an argument then holds what it held.
// [Drawn once] Random numbers are drawn while recording, as the operator is called, and thrown away; the operator keeps the
//     generator's state from before. The alternatives: the states are known only by drawing, as generators of the CPU can't be moved
//     to a position; replaying the whole tape in order would hold every unit that is not complete before the last operator (a GPT
//     initialised in a loop over all parameters: the whole model). Drawing needs memory for one tensor at a time. It also leaves the
//     generator as an ordinary constructor does, at every moment: what follows draws the same, and manual_seed in a constructor works.
namespace fsdp::deferred {

/// One call of an operator. Refers to older operations only, and does not change once it is recorded.
struct Operation {
  /// A tensor among the arguments.
  struct Input {
    std::optional<DeferredView> deferred;
    at::Tensor value;  ///< Otherwise: a copy of a tensor with memory, as it was. May be undefined.
  };
  /// An argument: `tensors` in place of the tensors of `value`, whose type says whether it is one, a list or a list of optional ones.
  struct Argument {
    c10::IValue value;
    std::vector<Input> tensors;
  };
  /// A new storage among the results.
  struct Output {
    std::size_t result = 0;   ///< Which result,
    std::size_t element = 0;  ///< and which of its tensors if it is a list.
    std::uint64_t cell = 0;
    std::size_t bytes = 0;
    Geometry geometry;
  };

  explicit Operation(const c10::OperatorHandle& handle);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  c10::OperatorHandle handle;
  std::uint64_t number;  ///< Later operations have greater ones.
  std::vector<Argument> arguments;
  std::vector<Output> outputs;
  c10::ScalarType default_dtype;

  bool random = false;
  at::Tensor generator_state;  ///< [Drawn once] Undefined if recorded without drawing.
  std::optional<std::size_t> generator_argument;
};

/// "aten::normal_" or "aten::add.Tensor".
std::string name_of(const c10::OperatorHandle& op);

/// Calls fn on each tensor of an argument or result, and puts what it returns in its place.
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

/// Computes the values of tensors without memory, and hands each to `take` as soon as the last operator that wrote to it has run. Views
/// of one storage come as views of one storage. What the tensors share is computed once; tensors that share nothing are
/// computed one after the other, so that memory is needed for the largest of them, not for all.
void replay(std::span<const DeferredView> wanted, const std::function<void(std::size_t index, const at::Tensor& value)>& take);

/// Not initialised; apart from malloc's heap where it is large: between the tape's small pieces, blocks that come and go would leave
/// ever new holes behind.
c10::Storage fresh_memory(std::size_t bytes);

/// The storage, of `contents.bytes` at least, with the contents in memory.
c10::Storage memory_with(const Contents& contents);

}  // namespace fsdp::deferred
