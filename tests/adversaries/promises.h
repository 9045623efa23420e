#pragma once

#include <fsdp/fsdp.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// What adversaries are made of: ranks, something to train, and what is promised.
namespace adversaries {

using Parts = std::vector<std::string>;

// What ranks found. In memory that forked processes share: a rank that is killed can tell nothing any more.
struct Findings {
  int wrong = 0;
  int done = 0;        // ranks that have done what was theirs to do
  pid_t pids[8] = {};  // of the ranks
};
inline Findings* findings = nullptr;

inline void add(int& counter) { __atomic_fetch_add(&counter, 1, __ATOMIC_SEQ_CST); }

inline void check(bool holds, const std::string& what) {
  if (holds) return;
  add(findings->wrong);
  std::fprintf(stderr, "%s\n", what.c_str());
}

template <typename Exception = fsdp::Error, typename Fn>
std::string message_of(const Fn& fn) {
  try {
    fn();
  } catch (const Exception& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another exception: ") + error.what();
  }
  return "no error";
}

/// fn throws an Exception whose text has all parts.
template <typename Exception = fsdp::Error, typename Fn>
void expect(const std::string& where, const Parts& parts, const Fn& fn) {
  const auto message = message_of<Exception>(fn);
  bool has_all = message != "no error" && !message.starts_with("another exception");
  for (const auto& part : parts) has_all = has_all && message.find(part) != std::string::npos;
  check(has_all, where + ": " + message);
}

// Long enough for a busy machine, short enough for a test.
constexpr auto kTimeout = std::chrono::seconds(4);

inline fsdp::DeviceMesh make_mesh() { return fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.timeout = kTimeout}); }

/// Three layers, each of another size.
inline torch::nn::Sequential make_model() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(4, 9), torch::nn::Tanh(), torch::nn::Linear(9, 6), torch::nn::Tanh(),
                               torch::nn::Linear(6, 1));
}

inline fsdp::FullyShardOptions options_on(const fsdp::DeviceMesh& mesh) {
  return {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>()};
}

inline at::Tensor loss_of(torch::nn::Sequential& model, std::int64_t seed = 0) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return model->forward(at::randn({5, 4}, generator)).square().mean();
}

/// Everything that a rank trains with.
struct Training {
  explicit Training(fsdp::FullyShardOptions options)
      : sharded(fsdp::fully_shard(*model, std::move(options))), optimizer(*model, {.lr = 0.1}) {}
  explicit Training(const fsdp::DeviceMesh& mesh) : Training(options_on(mesh)) {}
  void step(std::int64_t seed = 0) {
    loss_of(model, seed).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> values;
    for (const auto& [name, value] : sharded.full_parameters()) values.push_back(value);
    return values;
  }

  torch::nn::Sequential model = make_model();
  fsdp::FSDPModule sharded;
  fsdp::AdamW optimizer;
};

inline void expect_same(const std::string& where, const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool same = a.size() == b.size();
  for (std::size_t i = 0; same && i < a.size(); ++i) same = a[i].equal(b[i]);
  check(same, where + ": the values differ");
}

/// Runs a rank's part, and notes that it came to its end.
inline int run(int ranks, const std::function<void(int rank)>& part) {
  return fsdp::launch_local(ranks, [&] {
    const int rank = std::atoi(std::getenv("RANK"));
    findings->pids[rank] = getpid();
    at::set_num_threads(1);
    part(rank);
    add(findings->done);
    return 0;
  });
}

/// All ranks come to their end, and nothing was wrong.
inline void run_all(int ranks, const std::function<void(int rank)>& part) {
  const int result = run(ranks, part);
  check(result == 0 && findings->done == ranks,
        std::to_string(findings->done) + " of " + std::to_string(ranks) + " ranks came to their end");
}

}  // namespace adversaries
