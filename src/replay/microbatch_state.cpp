#include "replay/microbatch_state.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <mutex>

#include "fsdp/error.h"

namespace fsdp::replay {
namespace {

std::vector<at::Generator> generators_of(c10::Device device) {
  std::vector<at::Generator> found = {at::globalContext().defaultGenerator(at::kCPU)};
  if (!device.is_cpu()) found.push_back(at::globalContext().defaultGenerator(device));
  return found;
}

at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.cpu().contiguous().view({-1}).view(at::kByte); }

}  // namespace

MicrobatchState copy_state(c10::Device device, const std::vector<at::Tensor>& buffers) {
  const at::NoGradGuard no_grad;
  MicrobatchState copy;
  for (auto& generator : generators_of(device)) {
    const std::scoped_lock lock(generator.mutex());
    copy.generators.push_back(generator.get_state().clone());
  }
  for (const auto& buffer : buffers) copy.buffers.push_back(buffer.detach().clone());
  return copy;
}

void put_back(const MicrobatchState& copy, c10::Device device, const std::vector<at::Tensor>& buffers) {
  const at::NoGradGuard no_grad;
  auto generators = generators_of(device);
  for (std::size_t i = 0; i < generators.size(); ++i) {
    const std::scoped_lock lock(generators[i].mutex());
    generators[i].set_state(copy.generators[i]);
  }
  for (std::size_t i = 0; i < copy.buffers.size(); ++i) buffers[i].detach().copy_(copy.buffers[i]);
}

at::Tensor packed(const at::Tensor& batch, const MicrobatchState& state) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all = state.generators;
  for (const auto& buffer : state.buffers) all.push_back(bytes_of(buffer));
  all.push_back(batch);
  return at::cat(all);
}

std::pair<at::Tensor, MicrobatchState> unpacked(const at::Tensor& bytes, const MicrobatchState& like) {
  MicrobatchState found;
  std::int64_t at = 0;
  const auto take = [&](std::int64_t count) {
    if (at + count > bytes.numel()) throw Error("ReplayCheck: another rank's generators have a smaller state than this rank's");
    at += count;
    return bytes.narrow(0, at - count, count).clone();
  };
  for (const auto& state : like.generators) found.generators.push_back(take(state.numel()));
  for (const auto& buffer : like.buffers) {
    found.buffers.push_back(take(static_cast<std::int64_t>(buffer.nbytes())).view(buffer.scalar_type()).view(buffer.sizes()));
  }
  return {take(bytes.numel() - at), std::move(found)};
}

}  // namespace fsdp::replay
