// A convolutional network with batch norm learns to tell horizontal from vertical stripes, in images that are drawn as it runs.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdio>

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t in, std::int64_t out)
      : convolution(register_module("convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).stride(2).padding(1)))),
        norm(register_module("norm", torch::nn::BatchNorm2d(out))) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::relu(norm(convolution(x))); }
  torch::nn::Conv2d convolution;
  torch::nn::BatchNorm2d norm;
};
TORCH_MODULE(Block);

/// Images [count, 1, 16, 16] of noisy stripes, and their classes: 0 horizontal, 1 vertical.
std::pair<torch::Tensor, torch::Tensor> draw(std::int64_t count) {
  const auto classes = torch::randint(2, {count});
  const auto phases = torch::rand({count, 1, 1}) * 6.28;
  const auto stripes = torch::sin(torch::arange(16).view({1, 16, 1}) + phases).expand({count, 16, 16});
  const auto images = torch::where(classes.view({-1, 1, 1}) == 0, stripes, stripes.transpose(1, 2));
  return {(images + 0.5 * torch::randn({count, 16, 16})).unsqueeze(1), classes};
}

int train() {
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  torch::manual_seed(0);
  torch::nn::Sequential model(Block(1, 8), Block(8, 16), torch::nn::AdaptiveAvgPool2d(1), torch::nn::Flatten(), torch::nn::Linear(16, 2));
  fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<BlockImpl>()});
  fsdp::SGD optimizer(*model, {.lr = 0.05, .momentum = 0.9});

  torch::manual_seed(1 + mesh.rank());
  for (int step = 1; step <= 50; ++step) {
    const auto [images, classes] = draw(16);
    const auto loss = torch::cross_entropy_loss(model->forward(images), classes);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();

    const double mean = mesh.sum(loss.item<double>()) / static_cast<double>(mesh.size());
    if (mesh.rank() == 0 && step % 10 == 0) std::printf("step %d  loss %.4f\n", step, mean);
  }

  // Running statistics are each rank's own: buffers are not sharded, nor synchronized. Their mean over the ranks is used from here on.
  for (auto& buffer : model->buffers()) {
    if (!buffer.is_floating_point()) continue;
    for (std::int64_t i = 0; i < buffer.numel(); ++i) {
      buffer[i] = mesh.sum(buffer[i].item<double>()) / static_cast<double>(mesh.size());
    }
  }
  model->eval();
  const torch::NoGradGuard no_grad;
  const auto [images, classes] = draw(128);
  const auto right = mesh.sum((model->forward(images).argmax(1) == classes).sum().item<double>());
  if (mesh.rank() == 0) std::printf("%.0f of %lld images are told right\n", right, static_cast<long long>(128 * mesh.size()));
  return 0;
}

int main() { return fsdp::launch_local(2, train); }
