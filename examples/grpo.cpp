// GRPO: two ranks train a policy, and a third process generates with it what they learn from. The task has a reward that is easy to check:
// say the digits of the prompt again. After each update the trainers' weights go to the generator, tensor by tensor, and its samples
// come back. The program starts all three by itself.

#include <fsdp/fsdp.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "gpt.h"  // the policy, plain LibTorch

namespace {

constexpr int kTrainers = 2, kGenerator = 2;  // ranks 0 and 1, and the one behind them
constexpr int kUpdates = 80;
constexpr std::int64_t kDigits = 6, kLength = 3;
constexpr std::int64_t kPrompts = 8, kGroup = 16;  // of each trainer: the prompts of an update, and the samples of each prompt
const GPTConfig kPolicy{.vocab = kDigits, .dim = 32, .layers = 2, .heads = 4, .context = 2 * kLength, .rotary_base = 10};

/// The group of all three processes, which is theirs alone: the ranks that train have their mesh beside it.
class Group {
 public:
  Group(const std::string& file, int rank) {
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::minutes(2));
    options->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
    const auto store = c10::make_intrusive<c10d::FileStore>(file, kTrainers + 1);
    gloo_ = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, kTrainers + 1, options);
  }
  void send(const at::Tensor& tensor, int to) {
    std::vector<at::Tensor> tensors = {tensor.contiguous()};
    gloo_->send(tensors, to, /*tag=*/0)->wait();
  }
  void receive(const at::Tensor& into, int from) {
    std::vector<at::Tensor> tensors = {into};
    gloo_->recv(tensors, from, /*tag=*/0)->wait();
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
};

/// Those of the answers, [samples, kLength].
at::Tensor log_probabilities(const at::Tensor& logits, const at::Tensor& tokens) {
  const auto of_answer = logits.slice(1, kLength - 1, 2 * kLength - 1).log_softmax(-1);
  return of_answer.gather(-1, tokens.slice(1, kLength).unsqueeze(-1)).squeeze(-1);
}

/// The fraction of the answer that is right, [samples].
at::Tensor reward_of(const at::Tensor& tokens) { return tokens.slice(1, kLength).eq(tokens.slice(1, 0, kLength)).to(at::kFloat).mean(1); }

/// Prompts with answers, kGroup samples of each prompt one behind the other.
at::Tensor sample(GPT& policy) {
  auto tokens = torch::randint(kDigits, {kPrompts, kLength}, at::kLong).repeat_interleave(kGroup, 0);
  for (std::int64_t i = 0; i < kLength; ++i) {
    tokens = torch::cat({tokens, policy->forward(tokens).select(1, -1).softmax(-1).multinomial(1)}, 1);
  }
  return tokens;
}

/// What both sides compute in the end, to see that they have the same weights.
at::Tensor probe() { return torch::arange(10 * 2 * kLength).view({10, 2 * kLength}) % kDigits; }

int train(const std::string& meeting) {
  at::set_num_threads(1);
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  Group group(meeting, static_cast<int>(mesh.rank()));
  torch::manual_seed(0);
  GPT policy(kPolicy);
  for (auto& weight : policy->parameters()) weight.data().mul_(weight.dim() == 2 ? 4 : 1);  // so narrow a model begins with larger ones
  fsdp::fully_shard(*policy, {.mesh = mesh, .units = fsdp::each<GPTBlockImpl>()});
  fsdp::AdamW optimizer(*policy, {.lr = 3e-3});
  const auto tokens = torch::empty({kPrompts * kGroup, 2 * kLength}, at::kLong);
  const auto before = torch::empty({kPrompts * kGroup, kLength});
  for (int update = 0;; ++update) {
    for (const auto& bucket : fsdp::full_weights(*policy, {.ranks = fsdp::WeightReceivers::kFirst})) {
      for (const auto& [name, weight] : bucket.weights) group.send(weight, kGenerator);  // rank 1 has none, and helps to gather them
    }
    if (update == kUpdates) break;
    group.receive(tokens, kGenerator);
    group.receive(before, kGenerator);
    const auto of_group = reward_of(tokens).view({kPrompts, kGroup});
    // A sample is as good as it is better than others of its prompt.
    const auto better = of_group - of_group.mean(1, /*keepdim=*/true);
    const auto advantage = (better / (of_group.std(1, /*unbiased=*/true, /*keepdim=*/true) + 1e-4)).view({-1, 1});
    for (int pass = 0; pass < 2; ++pass) {
      const auto ratio = (log_probabilities(policy->forward(tokens), tokens) - before).exp();
      const auto gain = torch::minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage);
      (-gain.mean()).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  const torch::NoGradGuard no_grad;
  const auto logits = policy->forward(probe());
  if (mesh.rank() == 0) group.send(logits, kGenerator);
  return 0;
}

int generate(const std::string& meeting) {
  at::set_num_threads(1);
  const torch::NoGradGuard no_grad;
  Group group(meeting, kGenerator);
  torch::manual_seed(1);
  GPT policy(kPolicy);                  // an ordinary module
  auto weights = policy->parameters();  // in the order of full_weights: parameters, and then buffers
  for (const auto& buffer : policy->buffers()) weights.push_back(buffer);
  for (int update = 0;; ++update) {
    for (const auto& weight : weights) group.receive(weight.detach(), 0);
    if (update == kUpdates) break;
    double reward = 0;
    for (int rank = 0; rank < kTrainers; ++rank) {
      const auto tokens = sample(policy);
      group.send(tokens, rank);
      group.send(log_probabilities(policy->forward(tokens), tokens), rank);
      reward += reward_of(tokens).mean().item<double>() / kTrainers;
    }
    if (update % 10 == 0 || update + 1 == kUpdates) std::printf("update %d  reward %.3f\n", update + 1, reward);
    std::fflush(stdout);
  }
  const auto logits = torch::empty({10, 2 * kLength, kDigits});
  group.receive(logits, 0);
  std::printf("its logits and the trainers' differ by %g\n", (policy->forward(probe()) - logits).abs().max().item<double>());
  return 0;
}

}  // namespace

int main() {
  const auto meeting = (std::filesystem::temp_directory_path() / ("grpo-" + std::to_string(getpid()))).string();
  const auto generator = fork();  // as an inference engine is: not of the trainers' launcher
  if (generator < 0) std::perror("grpo: fork");
  if (generator <= 0) return generator < 0 ? 1 : generate(meeting);
  const int code = fsdp::launch_local(kTrainers, [&] { return train(meeting); });
  if (code != 0) kill(generator, SIGTERM);
  int status = 0;
  waitpid(generator, &status, 0);
  std::filesystem::remove(meeting);
  return code == 0 && status != 0 ? 1 : code;
}
