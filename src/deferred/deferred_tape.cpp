#include "deferred/deferred_tape.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "base/trap_key.h"
#include "fsdp/error.h"
#include "memory/device_memory.h"

namespace fsdp::deferred {
namespace {

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

void take_writers(Operation& operation, std::vector<std::shared_ptr<Operation>>& writers) {
  for (auto& argument : operation.arguments) {
    for (auto& input : argument.tensors) {
      if (input.deferred && input.deferred->contents.writer) writers.push_back(std::move(input.deferred->contents.writer));
    }
  }
}

template <typename Fn>
void for_each_input(const Operation& operation, const Fn& fn) {
  for (const auto& argument : operation.arguments) {
    for (const auto& input : argument.tensors) fn(input);
  }
}

/// Tensors that share operators or storages, and all operators that lead to them, in the recorded order.
struct ConnectedOperations {
  std::vector<std::size_t> wanted;
  std::vector<const Operation*> operations;
};

class Grouping {
 public:
  explicit Grouping(std::span<const DeferredView> wanted) : leader_(wanted.size()) {
    std::iota(leader_.begin(), leader_.end(), std::size_t{0});
    for (std::size_t i = 0; i < wanted.size(); ++i) visit(wanted[i].contents, i);
  }

  std::vector<ConnectedOperations> groups() {
    std::vector<ConnectedOperations> groups;
    std::unordered_map<std::size_t, std::size_t> group_of;
    for (std::size_t i = 0; i < leader_.size(); ++i) {
      const auto [found, is_new] = group_of.emplace(find(i), groups.size());
      if (is_new) groups.emplace_back();
      groups[found->second].wanted.push_back(i);
    }
    for (const auto& [operation, owner] : owner_) groups[group_of.at(find(owner))].operations.push_back(operation);
    for (auto& group : groups) {
      std::sort(group.operations.begin(), group.operations.end(), [](const auto* a, const auto* b) { return a->number < b->number; });
    }
    return groups;
  }

 private:
  void visit(const Contents& contents, std::size_t index) {
    unite(cell_owner_.emplace(contents.cell, index).first->second, index);
    std::vector<const Operation*> open;
    const auto reach = [&](const Contents& reached) {
      if (!reached.writer) return;
      const auto [found, is_new] = owner_.emplace(reached.writer.get(), index);
      if (is_new) {
        open.push_back(reached.writer.get());
      } else {
        unite(found->second, index);
      }
    };
    reach(contents);
    while (!open.empty()) {
      const auto* operation = open.back();
      open.pop_back();
      for_each_input(*operation, [&](const Operation::Input& input) {
        if (input.deferred) reach(input.deferred->contents);
      });
    }
  }

  std::size_t find(std::size_t index) {
    while (leader_[index] != index) index = leader_[index] = leader_[leader_[index]];
    return index;
  }
  void unite(std::size_t a, std::size_t b) { leader_[find(a)] = find(b); }

  std::vector<std::size_t> leader_;
  std::unordered_map<const Operation*, std::size_t> owner_;
  std::unordered_map<std::uint64_t, std::size_t> cell_owner_;
};

/// A guard. During its lifetime, the generator from which an operator draws has the state that it had when the operator was recorded.
class Drawing {
 public:
  Drawing(const Operation& operation, torch::jit::Stack& stack) {
    if (!operation.random) return;
    if (!operation.generator_state.defined()) {
      throw Error("operator '" + name_of(operation.handle) +
                  "' was recorded without drawing (DeferredInitOptions::draw = false), so its result has no value; take the values from "
                  "elsewhere: InitialValues::kZero and a checkpoint, or InitialValues::kFromRank0");
    }
    if (operation.generator_argument) {
      auto generator = at::detail::createCPUGenerator();
      set_state(generator, operation.generator_state);
      stack[*operation.generator_argument] = std::move(generator);
      return;
    }
    default_ = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(default_.mutex());
    before_ = default_.get_state();
    default_.set_state(operation.generator_state);
  }
  ~Drawing() {
    if (before_.defined()) set_state(default_, before_);
  }
  Drawing(const Drawing&) = delete;
  Drawing& operator=(const Drawing&) = delete;

 private:
  static void set_state(at::Generator& generator, const at::Tensor& state) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }

  at::Generator default_;
  at::Tensor before_;
};

/// A guard that sets torch's default dtype to the one that was set when an operator was recorded.
class DefaultDtype {
 public:
  explicit DefaultDtype(c10::ScalarType dtype) : before_(c10::get_default_dtype_as_scalartype()) { set(before_, dtype); }
  ~DefaultDtype() { set(c10::get_default_dtype_as_scalartype(), before_); }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;

 private:
  static void set(c10::ScalarType from, c10::ScalarType to) {
    if (from != to) c10::set_default_dtype(c10::scalarTypeToTypeMeta(to));
  }
  c10::ScalarType before_;
};

/// Runs operators on memory that exists as long as they need it.
class Replay {
 public:
  Replay(std::span<const DeferredView> wanted, const ConnectedOperations& group) : wanted_(wanted), group_(group) {
    for (std::size_t step = 0; step < group_.operations.size(); ++step) {
      const auto& operation = *group_.operations[step];
      for_each_input(operation, [&](const Operation::Input& input) {
        if (input.deferred) last_use_[input.deferred->contents.cell] = step;
      });
      for (const auto& output : operation.outputs) last_use_[output.cell] = step;
      step_of_[&operation] = step;
    }
  }

  void run(const std::function<void(std::size_t, const at::Tensor&)>& take) {
    std::vector<std::vector<std::size_t>> ready(group_.operations.size());
    std::vector<std::vector<std::uint64_t>> done(group_.operations.size());
    for (const auto& [cell, step] : last_use_) done[step].push_back(cell);
    for (const auto index : group_.wanted) {
      const auto& writer = wanted_[index].contents.writer;
      if (writer) {
        ready[step_of_.at(writer.get())].push_back(index);
      } else {
        take(index, view(wanted_[index]));
      }
    }
    for (std::size_t step = 0; step < group_.operations.size(); ++step) {
      call(*group_.operations[step]);
      for (const auto index : ready[step]) take(index, view(wanted_[index]));
      for (const auto cell : done[step]) memory_.erase(cell);
    }
  }

 private:
  at::Tensor view(const DeferredView& deferred) { return deferred.geometry.view(memory(deferred.contents)); }

  c10::Storage memory(const Contents& contents) {
    auto& memory = memory_[contents.cell];
    if (memory && memory.nbytes() >= contents.bytes) return memory;
    auto grown = fresh_memory(contents.bytes);
    if (memory && memory.nbytes() > 0) std::memcpy(grown.mutable_data(), memory.data(), memory.nbytes());
    return memory = std::move(grown);
  }

  void call(const Operation& operation) {
    torch::jit::Stack stack;
    for (const auto& argument : operation.arguments) {
      std::size_t next = 0;
      stack.push_back(map_tensors(argument.value, [&](const at::Tensor&) {
        const auto& input = argument.tensors[next++];
        return input.deferred ? view(*input.deferred) : input.value;
      }));
    }
    {
      const Drawing drawing(operation, stack);
      const DefaultDtype default_dtype(operation.default_dtype);
      operation.handle.callBoxed(&stack);
    }
    for (const auto& output : operation.outputs) keep(operation, output, stack);
  }

  /// Makes the result the memory of its cell, if it lies in its storage in the same way as the recorded result.
  void keep(const Operation& operation, const Operation::Output& output, torch::jit::Stack& stack) {
    at::Tensor result;
    std::size_t element = 0;
    map_tensors(stack[output.result], [&](const at::Tensor& tensor) {
      if (element++ == output.element) result = tensor;
      return tensor;
    });
    const auto geometry = Geometry::of(result);
    if (geometry.dtype != output.geometry.dtype || geometry.sizes != output.geometry.sizes) {
      throw Error("internal: operator '" + name_of(operation.handle) + "' gave another shape or dtype than when it was recorded");
    }
    auto& memory = memory_[output.cell];
    const bool same_place = geometry == output.geometry;
    if (!memory && same_place && result.storage().use_count() == 1 && result.storage().nbytes() >= output.bytes) {
      memory = result.storage();
    } else if (!memory && same_place) {
      // It shares the memory of another tensor, and its elements may overlap.
      memory = fresh_memory(output.bytes);
      std::memcpy(memory.mutable_data(), result.storage().data(), std::min(output.bytes, result.storage().nbytes()));
    } else {
      if (!memory) memory = fresh_memory(output.bytes);
      output.geometry.view(memory).copy_(result);
    }
  }

  std::span<const DeferredView> wanted_;
  const ConnectedOperations& group_;
  std::unordered_map<std::uint64_t, std::size_t> last_use_;
  std::unordered_map<const Operation*, std::size_t> step_of_;
  std::unordered_map<std::uint64_t, c10::Storage> memory_;
};

}  // namespace

Operation::Operation(const c10::OperatorHandle& handle_)
    : handle(handle_), number(next_number()), default_dtype(c10::get_default_dtype_as_scalartype()) {}

// One after the other: a table that was filled element by element is a chain as long as it has elements, too deep for the stack.
Operation::~Operation() {
  std::vector<std::shared_ptr<Operation>> released;
  take_writers(*this, released);
  while (!released.empty()) {
    const auto last = std::move(released.back());
    released.pop_back();
    if (last.use_count() == 1) take_writers(*last, released);
  }
}

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void replay(std::span<const DeferredView> wanted, const std::function<void(std::size_t index, const at::Tensor& value)>& take) {
  // Replays like a constructor, even if it is called in inference mode.
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKeySet(kTrapKey) | c10::autocast_dispatch_keyset);
  for (const auto& group : Grouping(wanted).groups()) Replay(wanted, group).run(take);
}

c10::Storage fresh_memory(std::size_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                            memory::allocate_as_torch(at::kCPU, static_cast<std::int64_t>(bytes)),
                                                            c10::GetAllocator(at::kCPU), /*resizable=*/true));
}

c10::Storage memory_with(const Contents& contents) {
  const DeferredView bytes{.contents = contents,
                           .geometry = {.dtype = at::kByte, .sizes = {static_cast<std::int64_t>(contents.bytes)}, .strides = {1}}};
  c10::Storage memory;
  replay({&bytes, 1}, [&](std::size_t, const at::Tensor& value) { memory = value.storage(); });
  return memory;
}

}  // namespace fsdp::deferred
