// Steps that fsdp::capture has made a graph of, against the same steps without one, bit for bit. A line for each, as of check_kernels.cpp:
// "passed NAME: VALUE", "failed NAME: WHY", "skipped NAME: WHY". See graphs.py.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int kWarmUp = 3;
constexpr int kReplays = 3;

struct Case {
  std::string name;
  bool bf16 = false;
  bool sgd = false;
  bool clipped = false;
};

class Trainee {
 public:
  Trainee(const Case& c, const fsdp::DeviceMesh& mesh) : clipped_(c.clipped) {
    torch::manual_seed(0);
    for (int layer = 0; layer < 4; ++layer) model_->push_back(torch::nn::Linear(48, 48));
    model_->to(mesh.device());
    fsdp::FullyShardOptions options{.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>()};
    if (c.bf16) options.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16};
    fsdp::fully_shard(*model_, options);
    if (c.sgd) {
      optimizer_ = std::make_unique<fsdp::SGD>(*model_, fsdp::SGDOptions{.lr = 0.05, .momentum = 0.9});
    } else {
      optimizer_ = std::make_unique<fsdp::AdamW>(*model_, fsdp::AdamWOptions{.lr = 1e-2});
    }
    const auto like = at::device(mesh.device());
    input_ = at::zeros({16, 48}, like.dtype(c.bf16 ? at::kBFloat16 : at::kFloat));
    loss_ = at::zeros({}, like);
    norm_ = at::zeros({}, like.dtype(at::kDouble));
  }

  void step() {
    const auto loss = model_->forward(input_).to(at::kFloat).square().mean();
    loss.backward();
    loss_.copy_(loss.detach());
    if (clipped_) norm_.copy_(fsdp::clip_grad_norm_(*model_, 0.01));
    optimizer_->step();
    optimizer_->zero_grad();
  }

  void set_input(int number) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(number));
    input_.copy_(at::randn({16, 48}, generator));
  }

  void warm_up() {
    for (int i = 0; i < kWarmUp; ++i) step();
  }
  fsdp::CapturedStep capture() {
    return fsdp::capture(*model_, [this] { step(); }, {.warm_up = kWarmUp});
  }
  double loss() const { return loss_.item<double>(); }
  double norm() const { return norm_.item<double>(); }

 private:
  const bool clipped_;
  torch::nn::Sequential model_;
  std::unique_ptr<fsdp::Optimizer> optimizer_;
  at::Tensor input_, loss_, norm_;
};

/// The losses and norms of the steps behind the warm-up, and a loss after one more step without a graph.
std::vector<double> train(const Case& c, const fsdp::DeviceMesh& mesh, bool captured) {
  Trainee trainee(c, mesh);
  std::vector<double> values;
  const auto steps = [&](const auto& run) {
    for (int number = 1; number <= kReplays; ++number) {
      trainee.set_input(number);
      run();
      values.push_back(trainee.loss());
      values.push_back(trainee.norm());
    }
  };
  trainee.set_input(0);
  if (captured) {
    auto step = trainee.capture();
    steps([&] { step.replay(); });
  } else {
    trainee.warm_up();
    steps([&] { trainee.step(); });
  }
  trainee.step();
  trainee.step();
  values.push_back(trainee.loss());
  return values;
}

bool check(const Case& c, const fsdp::DeviceMesh& mesh) {
  const std::string name = "fsdp::capture, " + c.name + ": ";
  try {
    const auto expected = train(c, mesh, /*captured=*/false);
    if (mesh.device().is_cpu()) {
      std::cout << "skipped " << name << "a rehearsal: the steps ran, without graphs" << std::endl;
      return true;
    }
    const auto found = train(c, mesh, /*captured=*/true);
    const bool equal = found == expected;
    std::cout << (equal ? "passed " : "failed ") << name << "last loss " << found.back()
              << (equal ? "" : ", not " + std::to_string(expected.back())) << std::endl;
    return equal;
  } catch (const std::exception& error) {
    const std::string what = error.what();
    std::cout << "failed " << name << what.substr(0, what.find('\n')) << std::endl;
    return false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string device = argc > 1 ? argv[1] : "cuda";
  return fsdp::launch_local(1, [&] {
    const auto mesh = fsdp::init_device_mesh(device, {{"dp_shard", -1}});
    bool passed = true;
    for (const Case& c : {Case{.name = "AdamW in fp32"}, Case{.name = "SGD in bf16", .bf16 = true, .sgd = true},
                          Case{.name = "AdamW in bf16, clipped", .bf16 = true, .clipped = true}}) {
      passed = check(c, mesh) && passed;
    }
    return passed ? 0 : 1;
  });
}
