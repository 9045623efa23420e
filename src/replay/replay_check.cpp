#include "fsdp/replay_check.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/serialize.h>

#include <cstring>
#include <string>

#include "base/classic_stream.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "replay/checker.h"

namespace fsdp {
namespace {

/// A batch as bytes. Copies first: a view would bring along all that it views. They are on the CPU, because what is loaded comes to the
/// device that it was saved on, which is the sender's; behind them is where each of them was.
at::Tensor batch_as_bytes(const std::vector<at::Tensor>& batch) {
  std::vector<at::Tensor> copies;
  copies.reserve(batch.size() + 1);
  const auto on_device = at::empty({static_cast<std::int64_t>(batch.size())}, at::kBool);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    on_device.mutable_data_ptr<bool>()[i] = !batch[i].is_cpu();
    copies.push_back(batch[i].is_cpu() ? batch[i].detach().clone() : batch[i].detach().cpu());
  }
  copies.push_back(on_device);
  ClassicStream<std::ostringstream> stream;
  torch::save(copies, stream);
  const auto text = std::move(stream).str();
  auto bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::vector<at::Tensor> batch_of_bytes(const at::Tensor& bytes, c10::Device device) {
  ClassicStream<std::istringstream> stream(std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()));
  std::vector<at::Tensor> batch;
  torch::load(batch, stream);
  const auto on_device = batch.back();
  batch.pop_back();
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (on_device.const_data_ptr<bool>()[i]) batch[i] = batch[i].to(device);
  }
  return batch;
}

}  // namespace

struct ReplayCheck::Parts {
  replay::Checker checker;
  c10::Device device;
};

ReplayCheck::ReplayCheck(const torch::nn::Module& module, std::int64_t every) : every_(every) {
  if (every < 1) throw Error("ReplayCheck: every must be positive, got " + std::to_string(every));
  const auto engine = handle(module).engine();
  parts_ = std::make_unique<Parts>(
      Parts{.checker = replay::Checker(engine, [&module] { return module.buffers(); }), .device = engine->options().device()});
}

ReplayCheck::~ReplayCheck() = default;

void ReplayCheck::run(const Microbatch& microbatch, const std::vector<at::Tensor>& batch) {
  const bool checks = is_due();
  ++runs_;
  if (!checks) return microbatch(batch);
  ++checked_;
  parts_->checker.check([&](const at::Tensor& bytes) { microbatch(batch_of_bytes(bytes, parts_->device)); }, batch_as_bytes(batch));
}

void ReplayCheck::remember_parameters() {
  if (is_due()) parts_->checker.remember_parameters();
}

}  // namespace fsdp
