// Programs of misuse and misfortune, each with the error, or the result, that the documents promise. `adversaries NAME` runs one and
// returns 0 if the promise was kept; CTest runs each with a time-out, since what must not happen above all is that somebody waits forever.

#include <fsdp/fsdp.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "misuse.h"
#include "promises.h"

namespace adversaries {
namespace {

// Ranks of which one does something else. Every rank is told, and told what both sides do.

/// Each rank runs its part, on which the last rank differs from the others.
void expect_divergence(int ranks, const std::function<void(int rank, const fsdp::DeviceMesh& mesh, Training& training)>& part) {
  run_all(ranks, [&](int rank) {
    const auto mesh = make_mesh();
    Training training(mesh);
    training.step();
    const Parts both = {"the ranks make different calls: rank ", "; rank " + std::to_string(ranks - 1) + ": #"};
    expect<fsdp::CommError>("rank " + std::to_string(rank), both, [&] { part(rank, mesh, training); });
  });
}

void skips_a_batch() {
  expect_divergence(2, [](int rank, const fsdp::DeviceMesh& mesh, Training& training) {
    for (int step = rank; step < 3; ++step) training.step(step);
    mesh.sum(1);
  });
}

void throws_alone_and_goes_on() {
  expect_divergence(2, [](int rank, const fsdp::DeviceMesh& mesh, Training& training) {
    for (int step = 0; step < 3; ++step) {
      try {
        if (rank == 1 && step == 1) training.model->forward(at::ones({5, 3}));  // does not fit
        training.step(step);
      } catch (const c10::Error&) {
        continue;
      }
    }
    mesh.sum(1);
  });
}

void reads_a_parameter_alone() {
  expect_divergence(2, [](int rank, const fsdp::DeviceMesh&, Training& training) {
    if (rank == 0) training.model->parameters()[2].sum();
    training.step();
    training.step();
  });
}

void interleaves_two_models_differently() {
  expect_divergence(2, [](int rank, const fsdp::DeviceMesh& mesh, Training& one) {
    Training other(mesh);
    if (rank == 0) one.step();
    other.step();
    if (rank == 1) one.step();
  });
}

void takes_another_branch() {
  expect_divergence(3, [](int rank, const fsdp::DeviceMesh&, Training& training) {
    auto x = training.model[rank == 2 ? 2 : 0]->as<torch::nn::Linear>()->forward(at::ones({2, rank == 2 ? 9 : 4}));
    x.sum().backward();
    training.step();
  });
}

void differs_in_an_option() {
  using Options = fsdp::FullyShardOptions;
  using Change = std::function<void(Options&, const fsdp::DeviceMesh&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"units", [](Options& o, const auto&) { o.units = {}; }},
      {"unit_groups",
       [](Options& o, const auto&) {
         o.unit_groups = {{"0", "2"}};
       }},
      {"ignore", [](Options& o, const auto&) { o.ignore = [](const std::string& name, const at::Tensor&) { return name == "2.bias"; }; }},
      {"placements", [](Options& o, const auto&) { o.placements = fsdp::Placements::optim(); }},
      {"initial_values", [](Options& o, const auto&) { o.initial_values = fsdp::InitialValues::kZero; }},
      {"reshard_after_forward", [](Options& o, const auto&) { o.reshard_after_forward = false; }},
      {"reshard_after_forward_size", [](Options& o, const auto&) { o.reshard_after_forward_size = 2; }},
      {"keep_gathered_bytes", [](Options& o, const auto&) { o.keep_gathered_bytes = 100; }},
      {"memory_budget", [](Options& o, const auto&) { o.memory_budget = fsdp::MemoryBudget{.bytes = std::int64_t{1} << 30}; }},
      {"prefetch_depth", [](Options& o, const auto&) { o.prefetch_depth = 2; }},
      {"granularity", [](Options& o, const auto&) { o.granularity = [](const auto&, const auto&) { return fsdp::Granularity::rows(); }; }},
      {"param_dtype", [](Options& o, const auto&) { o.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16}; }},
      {"main_params_dtype",
       [](Options& o, const auto&) { o.mixed_precision = fsdp::MixedPrecisionPolicy{.main_params_dtype = at::kDouble}; }},
      {"main_grads_dtype",
       [](Options& o, const auto&) { o.mixed_precision = fsdp::MixedPrecisionPolicy{.main_grads_dtype = at::kDouble}; }},
      {"grad_comm_dtype",
       [](Options& o, const auto&) { o.mixed_precision = fsdp::MixedPrecisionPolicy{.grad_comm_dtype = at::kBFloat16}; }},
      {"gather_format",
       [](Options& o, const auto&) {
         const auto format = std::make_shared<const fsdp::GatherFormat>(fsdp::float8_blocks(32));
         o.gather_format = [format](const auto&, const auto&) { return format; };
       }},
      {"grad_comm_format", [](Options& o, const auto&) { o.grad_comm_format = fsdp::GradCommFormat{.bits = 4}; }},
      {"offload", [](Options& o, const auto&) { o.offload = fsdp::Offload::kAll; }},
      {"report_nan_in_param_grad", [](Options& o, const auto&) { o.report_nan_in_param_grad = true; }},
      {"check_initial_values", [](Options& o, const auto&) { o.check_initial_values = true; }},
      {"separate_reduce_group", [](Options& o, const auto&) { o.separate_reduce_group = true; }},
      {"unit_settings.reshard_after_forward",
       [](Options& o, const auto&) {
         o.unit_settings = [](const auto&, const auto&) { return fsdp::UnitSettings{.reshard_after_forward = false}; };
       }},
      {"unit_settings.gradient_divide_factor",
       [](Options& o, const auto&) {
         o.unit_settings = [](const auto&, const auto&) { return fsdp::UnitSettings{.gradient_divide_factor = 3}; };
       }},
      {"unit_settings.grad_comm_format",
       [](Options& o, const auto&) {
         o.unit_settings = [](const auto&, const auto&) { return fsdp::UnitSettings{.grad_comm_format = fsdp::GradCommFormat{}}; };
       }},
      {"unit_settings.mixed_precision",
       [](Options& o, const auto&) {
         o.unit_settings = [](const auto&, const auto&) {
           return fsdp::UnitSettings{.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16}};
         };
       }},
      {"prefetch_depth that is refused", [](Options& o, const auto&) { o.prefetch_depth = -1; }},
  };
  for (const auto& [name, change] : changes) {
    const auto done = findings->done;
    run(4, [&, &name = name, &change = change](int rank) {
      const auto mesh = make_mesh();
      auto model = make_model();
      auto options = options_on(mesh);
      if (rank == 1) change(options, mesh);
      expect(name + ", rank " + std::to_string(rank), {"rank 0 and rank 1 differ"}, [&] { fsdp::fully_shard(*model, options); });
    });
    check(findings->done == done + 4, name + ": not all ranks came to their end");
  }
}

// Ranks that end.

void dies() {
  run(3, [](int rank) {
    const auto mesh = make_mesh();
    Training training(mesh);
    training.step();
    if (rank == 1) kill(getpid(), SIGKILL);
    expect<fsdp::CommError>("rank " + std::to_string(rank), {" of unit '", "' on rank " + std::to_string(rank) + " of 3", "last units"},
                            [&] {
                              for (int step = 0; step < 50; ++step) training.step(step);
                            });
    // What is tried afterwards fails at once.
    expect<fsdp::CommError>("afterwards", {"earlier collective failed"}, [&] { mesh.sum(1), training.step(), training.step(); });
  });
  check(findings->done == 2, "the others did not come to their end");
}

void uses_what_it_skips() {
  run_all(2, [](int rank) {
    const auto mesh = make_mesh();
    Training training(mesh);
    fsdp::attend(*training.model, rank == 0);
    const Parts promised = {"rank 1 uses unit '0'", "attend() with present = false", "on all ranks before each use"};
    if (rank == 1) expect("rank 1", promised, [&] { loss_of(training.model); });
    if (rank == 0) loss_of(training.model);
    fsdp::attend(*training.model, true);  // as before
    training.step();
  });
}

void attends_after_the_use() {
  expect_divergence(2, [](int rank, const fsdp::DeviceMesh&, Training& training) {
    if (rank == 0) fsdp::attend(*training.model, true);
    loss_of(training.model);
    if (rank == 1) fsdp::attend(*training.model, true);
  });
}

void skips_without_attending() {
  run_all(2, [](int rank) {
    const auto mesh = make_mesh();
    Training training(mesh);
    training.step();
    const Parts promised = {"the ranks make different calls: rank ",
                            "call attend() of the module on every rank before it is used or skipped"};
    expect<fsdp::CommError>("rank " + std::to_string(rank), promised, [&] {
      auto x = training.model[0]->as<torch::nn::Linear>()->forward(at::ones({2, 4}));
      if (rank == 0) x = training.model[2]->as<torch::nn::Linear>()->forward(x);
      x.sum().backward();
      mesh.sum(1);
    });
  });
}

void dies_while_it_is_absent() {
  run(3, [](int rank) {
    const auto mesh = make_mesh();
    Training training(mesh);
    const auto part = training.model->ptr(2);
    for (int step = 0; rank < 2 || step < 1; ++step) {
      const auto message = message_of<fsdp::CommError>([&] {
        fsdp::attend(*part, rank < 2);
        if (step == 1 && rank == 2) kill(getpid(), SIGKILL);
        auto x = training.model[0]->as<torch::nn::Linear>()->forward(at::ones({2, 4}));
        if (rank < 2) x = training.model[2]->as<torch::nn::Linear>()->forward(x);
        x.sum().backward();
      });
      if (message == "no error" && step < 2) continue;
      check(message.find("' on rank " + std::to_string(rank) + " of 3") != std::string::npos, message);
      return;
    }
    kill(getpid(), SIGKILL);
  });
  check(findings->done == 2, "the others did not come to their end");
}

void stops() {
  run(2, [](int rank) {
    const auto mesh = make_mesh();
    Training training(mesh);
    training.step();
    if (rank == 1) raise(SIGSTOP);
    expect<fsdp::CommError>("rank 0", {"MeshOptions::timeout", "last units that this rank touched"}, [&] { training.step(); });
    kill(findings->pids[1], SIGKILL);
  });
  check(findings->done == 1, "rank 0 did not come to its end");
}

void leaves_early() {
  run(2, [](int rank) {
    Training training(make_mesh());
    training.step();
    if (rank == 1) return;
    expect<fsdp::CommError>("rank 0", {"failed", "rank 0"}, [&] {
      for (int step = 0; step < 50; ++step) training.step(step);
    });
  });
  check(findings->done == 2, "rank 0 did not come to its end");
}

void fails_alone() {
  const int result = run(2, [](int rank) {
    Training training(make_mesh());
    if (rank == 1) throw fsdp::Error("rank 1 has had enough");
    for (int step = 0; step < 50; ++step) training.step(step);
  });
  check(result == 1 && findings->done == 0, "exit code " + std::to_string(result));
}

// What works although it looks as if it might not.

void throws_on_all_ranks() {
  run_all(2, [](int) {
    const auto mesh = make_mesh();
    Training calm(mesh);
    Training disturbed(mesh);
    for (int step = 0; step < 3; ++step) {
      calm.step(step);
      expect<c10::Error>("forward", {}, [&] { disturbed.model->forward(at::ones({5, 3})); });
      disturbed.step(step);
    }
    expect_same("after exceptions", disturbed.values(), calm.values());
  });
}

/// One layer in two places is one parameter: its gradient is the sum over its uses.
void ties_weights() {
  run_all(2, [](int) {
    const auto mesh = make_mesh();
    const auto make = [] {
      torch::manual_seed(5);
      torch::nn::Linear shared(4, 4);
      return torch::nn::Sequential(shared, torch::nn::Tanh(), shared, torch::nn::Linear(4, 1));
    };
    auto plain = make();
    auto model = make();
    const auto sharded = fsdp::fully_shard(*model, options_on(mesh));
    loss_of(plain).backward();
    loss_of(model).backward();
    const auto gradients = sharded.full_gradients();
    const auto expected = plain->named_parameters();
    check(gradients.size() == 4, std::to_string(gradients.size()) + " parameters");
    for (const auto& [name, gradient] : gradients) {
      check(gradient.defined() && gradient.allclose(expected[name].grad()), "gradient of " + name);
    }
  });
}

void moves_the_model() {
  run_all(2, [](int) {
    const auto mesh = make_mesh();
    Training stays(mesh);
    auto moved = std::make_unique<Training>(mesh);
    stays.step();
    moved->step();
    torch::nn::Sequential elsewhere = std::move(moved->model);
    fsdp::AdamW optimizer = std::move(moved->optimizer);
    auto sharded = moved->sharded;
    moved.reset();
    loss_of(elsewhere, 1).backward();
    optimizer.step();
    optimizer.zero_grad();
    stays.step(1);
    std::vector<at::Tensor> values;
    for (const auto& [name, value] : sharded.full_parameters()) values.push_back(value);
    expect_same("a moved model", values, stays.values());
  });
}

/// A clone is an ordinary model with the whole values.
void clones_a_sharded_model() {
  run_all(2, [](int) {
    Training training(make_mesh());
    training.step();
    const auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(training.model->clone());
    expect_same("a clone", clone->parameters(), training.values());
    clone->forward(at::ones({5, 4})).sum().backward();
    check(clone->parameters()[0].grad().defined(), "a clone has gradients of its own");
    for (const auto& [name, gradient] : training.sharded.full_gradients()) check(!gradient.defined(), "gradient of " + name);
    training.step(1);
  });
}

void goes_on_after_unsharding() {
  run_all(2, [](int) {
    const auto mesh = make_mesh();
    Training training(mesh);
    training.step();
    const auto values = training.values();
    fsdp::fully_unshard(*training.model);
    expect_same("unsharded", training.model->parameters(), values);
    expect("optimizer", {"fully_unshard made ordinary again"}, [&] { training.optimizer.step(); });
    expect("handle", {"fully_unshard made ordinary again"}, [&] { training.sharded.parameter_shards(); });
    fsdp::fully_shard(*training.model, options_on(mesh));
    check(loss_of(training.model).isfinite().item<bool>(), "sharded again");
  });
}

/// In the child of a fork there are neither Gloo's threads nor peers.
void forks() {
  run_all(2, [](int) {
    Training training(make_mesh());
    training.step();
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      const auto message = message_of([&] { training.step(); });
      const bool kept = message.find("fork") != std::string::npos;
      if (!kept) std::fprintf(stderr, "in the child: %s\n", message.c_str());
      _exit(kept ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child of a fork ended with status " + std::to_string(status));
    training.step();
  });
}

struct Adversary {
  const char* name;
  void (*run)();
};

// CMakeLists.txt reads the names here.
constexpr Adversary kAdversaries[] = {
    {"skips_a_batch", skips_a_batch},
    {"throws_alone_and_goes_on", throws_alone_and_goes_on},
    {"reads_a_parameter_alone", reads_a_parameter_alone},
    {"interleaves_two_models_differently", interleaves_two_models_differently},
    {"takes_another_branch", takes_another_branch},
    {"differs_in_an_option", differs_in_an_option},
    {"dies", dies},
    {"uses_what_it_skips", uses_what_it_skips},
    {"attends_after_the_use", attends_after_the_use},
    {"skips_without_attending", skips_without_attending},
    {"dies_while_it_is_absent", dies_while_it_is_absent},
    {"stops", stops},
    {"leaves_early", leaves_early},
    {"fails_alone", fails_alone},
    {"throws_on_all_ranks", throws_on_all_ranks},
    {"ties_weights", ties_weights},
    {"moves_the_model", moves_the_model},
    {"clones_a_sharded_model", clones_a_sharded_model},
    {"goes_on_after_unsharding", goes_on_after_unsharding},
    {"makes_the_optimizer_first", makes_the_optimizer_first},
    {"shards_twice", shards_twice},
    {"converts_afterwards", converts_afterwards},
    {"requires_gradients_afterwards", requires_gradients_afterwards},
    {"drops_gradients_in_a_hook", drops_gradients_in_a_hook},
    {"goes_back_twice", goes_back_twice},
    {"goes_back_through_an_old_graph", goes_back_through_an_old_graph},
    {"steps_without_a_backward", steps_without_a_backward},
    {"resets_after_a_failed_backward", resets_after_a_failed_backward},
    {"reads_by_pointers", reads_by_pointers},
    {"outlives_the_model", outlives_the_model},
    {"forks", forks},
};

}  // namespace
}  // namespace adversaries

int main(int argc, char** argv) {
  for (const auto& adversary : adversaries::kAdversaries) {
    if (argc != 2 || std::strcmp(argv[1], adversary.name) != 0) continue;
    void* const shared = mmap(nullptr, sizeof(adversaries::Findings), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 2;
    adversaries::findings = new (shared) adversaries::Findings;
    at::set_num_threads(1);  // ranks are forked, which needs a process of one thread
    adversary.run();
    return adversaries::findings->wrong == 0 ? 0 : 1;
  }
  std::fprintf(stderr, "usage: adversaries NAME\n");
  for (const auto& adversary : adversaries::kAdversaries) std::fprintf(stderr, "  %s\n", adversary.name);
  return 2;
}
