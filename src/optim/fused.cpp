#include "optim/fused.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::optim {
namespace {

/// The kernels take lists of tensors of one dtype on one device.
using Place = std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex>;

/// The entries of one place in the form that the kernels need: all tensors are dense, those of an entry have the same order of elements,
/// and a gradient has the dtype of its value. Tensors in another form are copied.
struct Batch {
  std::vector<at::Tensor> values, gradients, steps;
  std::vector<std::vector<at::Tensor>> states;
  std::optional<at::Tensor> grad_scale, found_inf;
  std::vector<std::pair<at::Tensor, at::Tensor>> to_copy_back;  // to, from
};

at::Tensor like(const at::Tensor& value, const at::Tensor& tensor, bool is_written, Batch& batch) {
  if (tensor.sizes() != value.sizes()) {
    throw Error("a parameter's part of the shape " + in_brackets(value.sizes()) + " has state or a gradient of the shape " +
                in_brackets(tensor.sizes()));
  }
  if (tensor.scalar_type() == value.scalar_type() && tensor.strides() == value.strides()) return tensor;
  auto copy = at::empty_strided(value.sizes(), value.strides(), value.options()).copy_(tensor);
  if (is_written) batch.to_copy_back.emplace_back(tensor, copy);
  return copy;
}

/// torch's CPU kernel for SGD gives wrong results for 16-bit tensors of 16 elements and more. They are widened for it, and the results are
/// rounded.
enum class In16Bits : std::uint8_t { kAsTheyAre, kWidenedOnCpu };

bool is_widened(const at::Tensor& value, In16Bits in_16_bits) {
  return in_16_bits == In16Bits::kWidenedOnCpu && value.is_cpu() && at::isReducedFloatingType(value.scalar_type());
}

std::map<Place, Batch> batches_of(const StepTensors& tensors, In16Bits in_16_bits) {
  std::map<Place, Batch> batches;
  // Counts on the host have few different values, so the device gets one tensor for each value, not one for each entry.
  std::map<std::pair<Place, double>, at::Tensor> counts;
  for (std::size_t i = 0; i < tensors.values.size(); ++i) {
    auto value = tensors.values[i];
    if (value.numel() == 0) continue;
    const bool is_copy = is_widened(value, in_16_bits) || !value.is_non_overlapping_and_dense();
    if (is_copy) value = value.contiguous().to(is_widened(value, in_16_bits) ? at::kFloat : value.scalar_type());
    const Place place{value.scalar_type(), value.device().type(), value.device().index()};
    auto& batch = batches[place];
    if (is_copy) batch.to_copy_back.emplace_back(tensors.values[i], value);
    batch.values.push_back(value);
    batch.gradients.push_back(like(value, tensors.gradients[i], /*is_written=*/tensors.grad_scale.defined(), batch));
    batch.states.resize(tensors.states.size());
    for (std::size_t s = 0; s < tensors.states.size(); ++s) {
      batch.states[s].push_back(like(value, tensors.states[s][i], /*is_written=*/true, batch));
    }
    if (tensors.grad_scale.defined() && !batch.grad_scale) batch.grad_scale = tensors.grad_scale.to(value.device());
    if (tensors.found_inf.defined()) batch.found_inf = tensors.found_inf;
    if (tensors.steps.empty()) continue;
    const auto& steps = tensors.steps[i];
    if (steps.device() == value.device() && steps.scalar_type() == at::kFloat) {
      batch.steps.push_back(steps);
      continue;
    }
    const auto count = steps.item<double>();
    auto& shared = counts[{place, count}];
    // The tensor is filled on the device, because a copy from the host would make the host wait.
    if (!shared.defined()) shared = at::full({}, count, value.options().dtype(at::kFloat));
    batch.steps.push_back(shared);
  }
  return batches;
}

template <typename Kernel>
void run(const StepTensors& tensors, const Kernel& kernel, In16Bits in_16_bits = In16Bits::kAsTheyAre) {
  for (auto& [place, batch] : batches_of(tensors, in_16_bits)) {
    kernel(batch);
    for (const auto& [to, from] : batch.to_copy_back) to.copy_(from);
  }
}

}  // namespace

void step_adam(const StepTensors& tensors, const AdamStep& step) {
  const auto kernel = [&](auto&& fused, Batch& batch) {
    fused(batch.values, batch.gradients, batch.states[0], batch.states[1], step.amsgrad ? batch.states[2] : std::vector<at::Tensor>{},
          batch.steps, step.lr, step.beta1, step.beta2, step.weight_decay, step.eps, step.amsgrad, step.maximize, batch.grad_scale,
          batch.found_inf);
  };
  run(tensors, [&](Batch& batch) {
    if (step.decoupled) {
      kernel([](auto&&... arguments) { at::_fused_adamw_(arguments...); }, batch);
    } else {
      kernel([](auto&&... arguments) { at::_fused_adam_(arguments...); }, batch);
    }
  });
}

void step_sgd(const StepTensors& tensors, const SGDStep& step) {
  const auto kernel = [&](Batch& batch) {
    at::_fused_sgd_(batch.values, batch.gradients, step.momentum != 0 ? batch.states[0] : std::vector<at::Tensor>{}, step.weight_decay,
                    step.momentum, step.lr, step.dampening, step.nesterov, step.maximize, step.is_first, batch.grad_scale, batch.found_inf);
  };
  run(tensors, kernel, In16Bits::kWidenedOnCpu);
}

void count_step(std::span<const at::Tensor> steps, const at::Tensor& found_inf) {
  std::vector<at::Tensor> others;
  for (const auto& count : steps) {
    if (count.is_cpu() && count.scalar_type() == at::kFloat) {
      *count.mutable_data_ptr<float>() += 1;  // without the dispatcher, for each of thousands of parameters
      count.unsafeGetTensorImpl()->bump_version();
    } else {
      others.push_back(count);
    }
  }
  if (others.empty()) return;
  at::_foreach_add_(others, 1);
  if (found_inf.defined()) at::_foreach_sub_(others, std::vector<at::Tensor>(others.size(), found_inf));
}

}  // namespace fsdp::optim
