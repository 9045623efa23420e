#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "generator.h"
#include "graph.h"
#include "host_clock.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace sim {
namespace {

/// Their results' shapes, or values of the host, depend on numbers of the device.
bool waits_for_values(const std::string& name) {
  static const std::set<std::string> names = {"aten::nonzero",    "aten::masked_select",    "aten::_unique", "aten::_unique2",
                                              "aten::unique_dim", "aten::bincount",         "aten::equal",   "aten::unique_consecutive",
                                              "aten::is_nonzero", "aten::repeat_interleave"};
  return names.count(name) > 0;
}

/// CUDA's kernels of these take small tensors of the host beside the device's.
bool takes_host_tensors(const std::string& name) { return name.find("index") != std::string::npos; }

/// One operator: on the stack, its arguments are replaced with tensors of the CPU over the same memory, the CPU's kernel runs, and its
/// results are replaced with tensors of the device. That is one kernel, as most operators are on a GPU.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        first_(stack.size() - schema_.arguments().size()),
        given_(stack.begin() + static_cast<std::ptrdiff_t>(first_), stack.end()) {}

  void run() {
    const at::AutoDispatchBelowADInplaceOrView below;
    for (std::size_t k = 0; k < given_.size(); ++k) convert_argument(k);
    if (device_ < 0) device_ = current_device();
    for (std::size_t k = 0; k < given_.size(); ++k) choose_generator(k);
    const auto stream = current_stream(device_);
    const auto launched = launch(stream, schema_.name(), ranges_);
    const torch::jit::Stack arguments(stack_.begin() + static_cast<std::ptrdiff_t>(first_), stack_.end());
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    if (waits_for_values(schema_.name()) || has_boolean_index_) host_waits(device_, launched.clock, "operator " + schema_.name());
    for (const auto& [device, cpu] : empty_outputs_) return_empty_output(device, cpu);
    for (std::size_t k = 0; k < schema_.returns().size(); ++k) convert_result(k);
    if (capture_of(stream) != 0) record(stream, arguments);
  }

 private:
  c10::IValue& on_stack(std::size_t k) { return stack_[first_ + k]; }

  bool writes(std::size_t k) const {
    const auto* alias = schema_.arguments()[k].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  /// In a graph: the same kernel on the same addresses. What it makes is copied to where that lies since the capture.
  void record(c10::Stream stream, const torch::jit::Stack& arguments) const {
    record_in_graph(stream, [op = op_, arguments, results = results_, returns = schema_.returns().size()] {
      const at::AutoDispatchBelowADInplaceOrView below;
      auto stack = arguments;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      for (const Result& result : results) {
        if (result.made.defined()) {
          result.to.copy_(result.made);
          continue;
        }
        const c10::IValue& value = stack[stack.size() - returns + result.number];
        result.to.copy_(value.isTensor() ? value.toTensor() : value.toTensorVector()[result.in_list]);
      }
    });
  }

  void convert_argument(std::size_t k) {
    const c10::IValue& value = given_[k];
    if (value.isTensor()) {
      on_stack(k) = to_cpu(value.toTensor(), k);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_cpu(tensor, k));
      on_stack(k) = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) list.push_back(tensor ? std::optional(to_cpu(*tensor, k)) : tensor);
      on_stack(k) = std::move(list);
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kType && device_ < 0) device_ = index_of(value.toDevice());
      on_stack(k) = c10::Device(c10::kCPU);
    }
  }

  at::Tensor to_cpu(const at::Tensor& tensor, std::size_t k) {
    if (!tensor.defined()) return tensor;
    const auto& argument = schema_.arguments()[k];
    if (tensor.device().type() != kType) {
      const bool may_be = tensor.dim() == 0 || takes_host_tensors(schema_.name()) || argument.is_out() || !tensor.device().is_cpu();
      TORCH_CHECK(may_be, "sim: ", schema_.name(), " got a tensor of the host among the device's: ", argument.name());
      return writes(k) ? tensor : tensor.clone();  // Kernels get the value; a graph keeps it.
    }
    if (device_ < 0) device_ = tensor.device().index();
    TORCH_CHECK(tensor.device().index() == device_, "sim: ", schema_.name(), " got tensors of two devices");
    const bool is_mask = tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    if (argument.name() == "indices" && is_mask) has_boolean_index_ = true;
    tensors_.push_back(tensor);
    if (writes(k) && tensor.numel() == 0) {  // The kernel may give it memory, which has to be the CPU's.
      empty_outputs_.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
      return empty_outputs_.back().second;
    }
    add_ranges(ranges_, tensor, writes(k));
    return on_cpu(tensor);
  }

  void choose_generator(std::size_t k) {
    if (given_[k].isGenerator()) {
      on_stack(k) = static_cast<Generator*>(given_[k].toGenerator().unsafeGetGeneratorImpl())->on_cpu();
    } else if (given_[k].isNone() && schema_.arguments()[k].type()->str() == "Generator?") {
      on_stack(k) = static_cast<Generator*>(default_generator(device_).unsafeGetGeneratorImpl())->on_cpu();
    }
  }

  void return_empty_output(const at::Tensor& device, const at::Tensor& cpu) {
    if (cpu.numel() == 0) return;
    device.resize_(cpu.sizes());
    fill(device, cpu);
    results_.push_back({.to = on_cpu(device), .made = cpu});
  }

  void convert_result(std::size_t k) {
    c10::IValue& value = on_stack(k);  // Results lie where arguments were.
    const auto* alias = schema_.returns()[k].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (std::size_t argument = 0; argument < given_.size(); ++argument) {
        const auto* other = schema_.arguments()[argument].alias_info();
        if (other != nullptr && *other == *alias) value = given_[argument];
      }
    } else if (value.isTensor()) {
      value = to_device(value.toTensor(), k, 0);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      std::size_t in_list = 0;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor, k, in_list++));
      value = std::move(list);
    }
  }

  at::Tensor to_device(const at::Tensor& cpu, std::size_t number, std::size_t in_list) {
    if (!cpu.defined() || !cpu.device().is_cpu()) return cpu;
    if (cpu.numel() > 0) {
      for (const at::Tensor& tensor : tensors_) {
        if (tensor.storage().nbytes() == 0) continue;
        const auto* const begin = static_cast<const std::byte*>(behind(tensor.storage().data()));
        const auto* const data = static_cast<const std::byte*>(cpu.const_data_ptr());
        if (data < begin || data >= begin + tensor.storage().nbytes()) continue;
        return view_of_argument(tensor, cpu, (data - begin) / static_cast<std::ptrdiff_t>(cpu.itemsize()));
      }
    }
    auto device = empty_strided(cpu.sizes(), cpu.strides(), cpu.scalar_type(), device_);
    if (cpu.numel() > 0) {
      fill(device, cpu);
      results_.push_back({.to = on_cpu(device), .number = number, .in_list = in_list});
    }
    return device;
  }

  static at::Tensor view_of_argument(const at::Tensor& tensor, const at::Tensor& cpu, std::int64_t offset) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), cpu.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), offset);
    return view;
  }

  /// The kernel has written it, though its memory was allocated later here.
  void fill(const at::Tensor& device, const at::Tensor& cpu) {
    on_cpu(device).copy_(cpu);
    std::vector<Range> ranges;
    add_ranges(ranges, device, /*write=*/true);
    launch(current_stream(device_), schema_.name(), ranges, Counts::kNot);
    note_in_graph(current_stream(device_), ranges);
  }

  /// What a kernel gives, and where it lies on the device.
  struct Result {
    at::Tensor to;
    std::size_t number = 0;   ///< Of the return value,
    std::size_t in_list = 0;  ///< and in it, if that is a list;
    at::Tensor made = {};     ///< or an argument that the kernel has given memory.
  };

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const std::size_t first_;  // of the arguments, and then of the results
  const std::vector<c10::IValue> given_;
  int device_ = -1;
  std::vector<Range> ranges_;
  std::vector<at::Tensor> tensors_;                               // of the device
  std::vector<std::pair<at::Tensor, at::Tensor>> empty_outputs_;  // of the device, and the CPU's in its place
  std::vector<Result> results_;
  bool has_boolean_index_ = false;
};

bool is_of_lists(const std::string& name) { return name.starts_with("aten::_foreach_"); }

bool lie_alike(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (std::int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

/// CUDA has one kernel for lists of tensors of one dtype, that are dense and lie alike. Of a copy, both lists may have a dtype each.
bool is_one_kernel_of_lists(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  std::vector<std::vector<at::Tensor>> lists;
  for (std::size_t k = stack.size() - schema.arguments().size(); k < stack.size(); ++k) {
    if (stack[k].isTensorList()) lists.push_back(stack[k].toTensorVector());
  }
  const bool copies = schema.name() == "aten::_foreach_copy_";
  return std::all_of(lists.begin(), lists.end(), [&](const std::vector<at::Tensor>& list) {
    if (list.size() != lists[0].size() || list.empty()) return false;
    const at::Tensor& like = copies ? list[0] : lists[0][0];
    for (std::size_t k = 0; k < list.size(); ++k) {
      const at::Tensor& tensor = list[k];
      const bool fits = tensor.device() == lists[0][0].device() && tensor.scalar_type() == like.scalar_type() &&
                        tensor.is_non_overlapping_and_dense() && lie_alike(tensor, lists[0][k]);
      if (!fits) return false;
    }
    return true;
  });
}

/// For other lists torch calls the operator of one tensor again and again, as for CUDA.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (is_of_lists(op.schema().name()) && !is_one_kernel_of_lists(op.schema(), *stack)) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
  } else {
    Call(op, *stack).run();
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

/// Composite kernels come before a fallback. Whatever has a kernel for the CPU gets it here, too, and so do operators for which a GPU has
/// one kernel and the CPU many.
bool is_one_kernel(const c10::OperatorHandle& op, const std::string& name) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || is_of_lists(name) || name == "aten::split_with_sizes_copy" ||
         name == "aten::_chunk_cat";
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  const std::set<std::string> own = {"empty.memory_format",
                                     "empty_strided",
                                     "as_strided",
                                     "view",
                                     "_reshape_alias",
                                     "resize_",
                                     "set_.source_Storage_storage_offset",
                                     "set_.source_Storage",
                                     "set_.source_Tensor",
                                     "set_",
                                     "record_stream",
                                     "_local_scalar_dense",
                                     "_copy_from",
                                     "_copy_from_and_resize",
                                     "_has_compatible_shallow_copy_type"};  // operators.cpp's
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto in_library = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    const auto op = dispatcher.findOp(name);
    if (!op || own.count(in_library) > 0 || !is_one_kernel(*op, name.name)) continue;
    m.impl(in_library.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace
}  // namespace sim
