// Recording: the trap passes operators on to this file that are called while a model is built without memory, or on tensors of such a
// model. An operator runs on the meta device, which gives shapes and autograd. The storages that it writes and makes then refer to it.

#include "deferred/deferred_record.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/trap_key.h"
#include "deferred/deferred_tape.h"
#include "deferred/operator_facts.h"
#include "fsdp/error.h"

namespace fsdp::deferred {
namespace {

using Values = torch::jit::Stack;

void copy_wrapped_number(const at::Tensor& from, const at::Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

at::Tensor meta_like(const at::Tensor& tensor) {
  const auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  copy_wrapped_number(tensor, meta);
  return meta;
}

/// A copy of a tensor that may change or lose its memory before it is needed.
at::Tensor kept(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const auto copy = tensor.detach().clone();
  copy_wrapped_number(tensor, copy);
  return copy;
}

/// A tensor of the same geometry that carries the key, over `storage`.
c10::intrusive_ptr<c10::TensorImpl> deferred_impl(const at::Tensor& tensor, c10::Storage storage) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), tensor.key_set() | c10::DispatchKeySet(kTrapKey), tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return impl;
}

/// A tensor among an operator's arguments, in its state before the call.
struct TensorArgument {
  at::Tensor tensor;
  bool written = false;
  c10::intrusive_ptr<DeferredStorage> storage;  ///< The storage; null if the tensor has memory.
  DeferredView view;                            ///< Its contents; used only if it has no memory.
};

/// A guard during which the storages of some uses return their addresses, for operators on the meta device.
class Unlocked {
 public:
  explicit Unlocked(const std::vector<TensorArgument>& uses) : uses_(uses) {
    for (const auto& use : uses_) {
      if (use.storage) use.storage->unlock();
    }
  }
  ~Unlocked() {
    for (const auto& use : uses_) {
      if (use.storage) use.storage->lock();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  const std::vector<TensorArgument>& uses_;
};

/// One call of an operator, with the key excluded.
class RecordedOperator {
 public:
  RecordedOperator(const c10::OperatorHandle& op, Values arguments);
  Values run();

 private:
  enum class Inputs : std::uint8_t { kValues, kUndefined };

  [[noreturn]] void fail(const std::string& what) const { throw Error("operator '" + name_of(op_) + "' " + what); }

  Values one_by_one() const;
  Values recorded();

  template <typename Fn>
  Values with_tensors(const Fn& fn) const;
  Values called(Values arguments) const;
  std::optional<Values> on_meta() const;
  Values in_memory(Inputs inputs);
  Values without_memory(const Values& results) const;

  at::Tensor generator_state() const;
  at::Tensor adopt(const at::Tensor& tensor, std::size_t result, std::size_t element);
  Operation::Input input(const TensorArgument& use) const;
  void append(const std::shared_ptr<Operation>& operation);

  const c10::OperatorHandle op_;
  Values arguments_;
  std::vector<TensorArgument> uses_;  // in the order of map_tensors over the arguments
  bool takes_deferred_ = false;
  bool writes_deferred_ = false;
  bool takes_memory_ = false;
  bool writes_memory_ = false;
  std::optional<std::size_t> generator_argument_;
  std::shared_ptr<DeferredSession> session_ = current_session();
  std::vector<at::Tensor> in_memory_;  // the uses, as in_memory() passed them
  std::vector<Operation::Output> outputs_;
  std::unordered_map<const c10::StorageImpl*, std::pair<c10::Storage, c10::intrusive_ptr<DeferredStorage>>> made_;
};

RecordedOperator::RecordedOperator(const c10::OperatorHandle& op, Values arguments) : op_(op), arguments_(std::move(arguments)) {
  const auto& schema = op_.schema().arguments();
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    const auto* alias = schema[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    map_tensors(arguments_[i], [&](const at::Tensor& tensor) {
      auto& use = uses_.emplace_back(TensorArgument{.tensor = tensor, .written = written, .storage = {}, .view = {}});
      auto* storage = DeferredStorage::of(tensor);
      if (storage == nullptr) return tensor;
      if (!storage->memory() && storage->session()->home) {
        // The module keeps this tensor neither as a parameter nor as a buffer.
        const auto memory = memory_with(storage->contents());
        const auto bytes = at::empty({0}, at::kByte).set_(memory);
        storage->set_memory(bytes.to(*storage->session()->home).storage());
      }
      if (storage->memory()) {
        become(tensor, Geometry::of(tensor).view(storage->memory()));
        return tensor;
      }
      use.storage = c10::intrusive_ptr<DeferredStorage>::reclaim_copy(storage);
      use.view = {.contents = storage->contents(), .geometry = Geometry::of(tensor)};
      if (!session_) session_ = storage->session();
      return tensor;
    });
    if (arguments_[i].isGenerator() || schema[i].name() == "generator") generator_argument_ = i;
  }
  for (const auto& use : uses_) {
    if (!use.tensor.defined()) continue;
    (use.storage ? takes_deferred_ : takes_memory_) = true;
    if (use.written) (use.storage ? writes_deferred_ : writes_memory_) = true;
  }
  if (op_.hasTag(at::Tag::inplace_view)) writes_deferred_ = false;  // it writes their shapes, not their contents
}

Values RecordedOperator::run() {
  const bool recording = current_session() != nullptr;
  if (!takes_deferred_) {
    return recording && uses_.empty() && is_factory(op_) ? recorded() : called(arguments_);
  }
  if (op_.operator_name().name.starts_with("aten::_foreach_") && arguments_.front().isList() && arguments_.front().toListRef().size() > 1) {
    return one_by_one();
  }
  // Operators that write to memory of other tensors, or return a value, are computed now.
  if (writes_memory_ && writes_deferred_) {
    fail("writes tensors with memory and tensors that fsdp::deferred_init made at once; call it for each");
  }
  if (writes_memory_ || op_.hasTag(at::Tag::data_dependent_output)) return in_memory(Inputs::kValues);
  if (!recording && takes_memory_ && !writes_deferred_) {
    fail(
        "takes a tensor that fsdp::deferred_init made, which has no memory yet, together with others that have; give the model its values "
        "first: call fsdp::fully_shard or fsdp::materialize");
  }
  return recorded();
}

/// Operators on lists do the same to each element: recorded apart, the elements do not need each other.
Values RecordedOperator::one_by_one() const {
  const std::size_t count = arguments_.front().toListRef().size();
  std::vector<c10::List<at::Tensor>> joined(op_.schema().returns().size());
  for (std::size_t i = 0; i < count; ++i) {
    auto arguments = arguments_;
    for (std::size_t k = 0; k < arguments.size(); ++k) {
      auto& value = arguments[k];
      if (value.isList() && value.toListRef().size() == count) {
        const auto list = value.toList();
        c10::impl::GenericList element(list.elementType());
        element.push_back(list.get(i));
        value = element;
      } else if (value.isTensor() && op_.schema().arguments()[k].name() == "scalars") {
        value = value.toTensor().narrow(0, static_cast<std::int64_t>(i), 1);
      }
    }
    const auto results = RecordedOperator(op_, std::move(arguments)).run();
    for (std::size_t k = 0; k < results.size(); ++k) joined[k].push_back(results[k].toTensorVector().front());
  }
  return {joined.begin(), joined.end()};
}

template <typename Fn>
Values RecordedOperator::with_tensors(const Fn& fn) const {
  Values values;
  std::size_t next = 0;
  for (const auto& argument : arguments_) {
    values.push_back(map_tensors(argument, [&](const at::Tensor&) {
      const std::size_t index = next++;
      return fn(uses_[index], index);
    }));
  }
  return values;
}

Values RecordedOperator::called(Values arguments) const {
  // A tensor without memory is on the meta device, which therefore stands for the CPU here.
  const bool recording = current_session() != nullptr;
  for (auto& value : arguments) {
    if (recording && value.isDevice() && value.toDevice().is_meta()) value = c10::Device(c10::kCPU);
  }
  op_.callBoxed(&arguments);
  return arguments;
}

/// Calls the operator on the meta device. Returns nothing if that is impossible, because its result depends on values, or because it exists
/// for the CPU only. (If it exists for no device, the call with memory throws.)
std::optional<Values> RecordedOperator::on_meta() const {
  if (op_.hasTag(at::Tag::dynamic_output_shape) && op_.operator_name().name != "aten::index") return std::nullopt;
  const Unlocked unlocked(uses_);
  try {
    auto arguments = with_tensors(
        [](const TensorArgument& use, std::size_t) { return use.storage || !use.tensor.defined() ? use.tensor : meta_like(use.tensor); });
    const auto& schema = op_.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].isDevice() || (uses_.empty() && schema[i].name() == "device")) arguments[i] = c10::Device(c10::kMeta);
      if (schema[i].name() == "pin_memory") arguments[i] = c10::IValue();
    }
    op_.callBoxed(&arguments);
    return arguments;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

/// Calls the operator on tensors in memory, which have the values of the uses, or only their shapes.
Values RecordedOperator::in_memory(Inputs inputs) {
  in_memory_.clear();
  std::vector<DeferredView> wanted;
  std::vector<std::size_t> wanted_by;
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    const auto& use = uses_[i];
    in_memory_.push_back(use.tensor);
    if (!use.storage) continue;
    if (inputs == Inputs::kUndefined) {
      in_memory_.back() = use.view.geometry.view(fresh_memory(use.view.contents.bytes));
    } else {
      wanted.push_back(use.view);
      wanted_by.push_back(i);
    }
  }
  replay(wanted, [&](std::size_t index, const at::Tensor& value) { in_memory_[wanted_by[index]] = value; });
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    // Calls that autograd refuses fail here as well.
    if (uses_[i].storage && inputs == Inputs::kValues && uses_[i].tensor.requires_grad()) in_memory_[i].requires_grad_();
  }
  auto arguments = with_tensors([&](const TensorArgument&, std::size_t index) { return in_memory_[index]; });
  for (auto& value : arguments) {
    if (value.isDevice() && value.toDevice().is_meta()) value = c10::Device(c10::kCPU);
  }
  op_.callBoxed(&arguments);
  return arguments;
}

/// Converts results of in_memory() to the form that the meta device would have returned.
Values RecordedOperator::without_memory(const Values& results) const {
  Values values;
  for (std::size_t k = 0; k < results.size(); ++k) {
    const auto* alias = op_.schema().returns()[k].alias_info();
    values.push_back(map_tensors(results[k], [&](const at::Tensor& result) {
      if (!result.defined()) return result;
      if (!result.has_storage() || result.layout() != at::kStrided) fail("gives a tensor that is not dense; call it before deferred_init");
      const auto geometry = Geometry::of(result);
      for (std::size_t i = 0; i < uses_.size(); ++i) {
        if (!uses_[i].storage || !in_memory_[i].storage().is_alias_of(result.storage())) continue;
        if (alias != nullptr && alias->isWrite() && uses_[i].written) return uses_[i].tensor;
        return geometry.view(c10::Storage(uses_[i].storage));
      }
      return geometry.view(c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), result.storage().nbytes(), c10::GetAllocator(c10::kMeta), /*resizable=*/true)));
    }));
  }
  return values;
}

Values RecordedOperator::recorded() {
  for (const auto& value : arguments_) {
    if (value.isDevice() && !value.toDevice().is_cpu() && !value.toDevice().is_meta()) {
      fail("asks for device " + value.toDevice().str() +
           "; build the model on the CPU: fully_shard brings the shards to the mesh's device, and fsdp::materialize takes a device");
    }
  }
  for (const auto& use : uses_) {
    if (use.storage) use.storage->lock();
  }
  auto results = on_meta();
  if (!results && !writes_deferred_ && !returns_tensors(op_)) return in_memory(Inputs::kValues);
  if (results && uses_.empty() && results->size() == 1 && results->front().isTensor()) {
    // A tensor without bytes can get its memory now. torch::load gives such a tensor a storage.
    const auto& result = results->front().toTensor();
    if (result.has_storage() && result.storage().nbytes() == 0) return called(arguments_);
  }

  const auto operation = std::make_shared<Operation>(op_);
  operation->random = op_.hasTag(at::Tag::nondeterministic_seeded);
  operation->generator_argument = generator_argument_;
  const bool draw = operation->random && session_->draw;
  if (draw) operation->generator_state = generator_state();
  if (draw || !results) {
    if (operation->random && !draw) fail("has to be called to know its result's shape, which DeferredInitOptions::draw = false forbids");
    const auto drawn = in_memory(draw && (is_random_fill(op_) || takes_shape_only(op_)) ? Inputs::kUndefined : Inputs::kValues);
    if (!results) results = without_memory(drawn);
    in_memory_.clear();
  }

  for (std::size_t k = 0; k < results->size(); ++k) {
    std::size_t element = 0;
    (*results)[k] = map_tensors((*results)[k], [&](const at::Tensor& tensor) { return adopt(tensor, k, element++); });
  }
  if (writes_deferred_ || (!outputs_.empty() && !makes_undefined(op_))) append(operation);
  return std::move(*results);
}

at::Tensor RecordedOperator::generator_state() const {
  auto generator = at::detail::getDefaultCPUGenerator();
  if (generator_argument_ && arguments_[*generator_argument_].isGenerator()) generator = arguments_[*generator_argument_].toGenerator();
  if (!generator.device().is_cpu())
    fail("draws from a generator of " + generator.device().str() + "; deferred_init builds models on the CPU");
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

/// Replaces the storage of a result of the call without memory by one that knows which operation computes its contents.
at::Tensor RecordedOperator::adopt(const at::Tensor& tensor, std::size_t result, std::size_t element) {
  if (!tensor.defined()) return tensor;
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) fail("gives a tensor that is not dense; call it before deferred_init");
  c10::Storage storage = tensor.storage();
  if (DeferredStorage::of(tensor) == nullptr) {
    auto& [from, made] = made_[storage.unsafeGetStorageImpl()];
    if (!made) {
      from = storage;  // so that its address stays its own
      made = c10::make_intrusive<DeferredStorage>(storage.nbytes(), nullptr, session_, /*pristine=*/uses_.empty());
    }
    outputs_.push_back(
        {.result = result, .element = element, .cell = made->contents().cell, .bytes = made->nbytes(), .geometry = Geometry::of(tensor)});
    storage = c10::Storage(made);
  } else if (tensor.key_set().has(kTrapKey)) {
    return tensor;
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(deferred_impl(tensor, std::move(storage)));
  return tensor;
}

Operation::Input RecordedOperator::input(const TensorArgument& use) const {
  if (!use.storage) return {.deferred = {}, .value = use.tensor.defined() ? kept(use.tensor) : at::Tensor()};
  auto view = use.view;
  const bool is_first = &use == uses_.data();
  if (is_first && overwrites(op_) && use.tensor.is_non_overlapping_and_dense() && use.tensor.nbytes() == view.contents.bytes) {
    view.contents.writer = nullptr;  // the former contents, and the operators that led to them, are no longer needed
  }
  if (takes_shape_only(op_)) view.contents.writer = nullptr;
  return {.deferred = std::move(view), .value = {}};
}

void RecordedOperator::append(const std::shared_ptr<Operation>& operation) {
  std::size_t next = 0;
  const auto& schema = op_.schema().arguments();
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    auto& argument = operation->arguments.emplace_back();
    argument.value = map_tensors(arguments_[i], [&](const at::Tensor&) {
      argument.tensors.push_back(input(uses_[next++]));
      return at::Tensor();
    });
    if (argument.value.isDevice()) argument.value = c10::Device(c10::kCPU);
    if (schema[i].name() == "pin_memory") argument.value = c10::IValue();
  }
  operation->outputs = std::move(outputs_);
  for (const auto& [address, made] : made_) made.second->written_by(operation);
  for (const auto& use : uses_) {
    if (use.storage && use.written) use.storage->written_by(operation);
  }
}

}  // namespace

std::shared_ptr<DeferredSession>& current_session() {
  thread_local std::shared_ptr<DeferredSession> session;
  return session;
}

void record(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard untrapped(kTrapKey);
  const auto count = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  RecordedOperator call(op, Values(arguments.begin(), arguments.end()));
  torch::jit::drop(*stack, count);
  auto results = call.run();
  std::move(results.begin(), results.end(), std::back_inserter(*stack));
}

}  // namespace fsdp::deferred
