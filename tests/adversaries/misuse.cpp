#include "misuse.h"

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "promises.h"

namespace adversaries {
namespace {

/// On one rank and on two: each error comes before anything waits.
void run_misuse(const std::function<void(const fsdp::DeviceMesh&)>& part) {
  for (const int ranks : {1, 2}) {
    findings->done = 0;
    run_all(ranks, [&](int) { part(make_mesh()); });
  }
}

}  // namespace

void makes_the_optimizer_first() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    auto model = make_model();
    expect("AdamW", {"not a unit of a sharded model", "fully_shard"}, [&] { fsdp::AdamW optimizer(*model); });
    torch::optim::SGD of_torch(model->parameters(), 0.1);
    const auto sharded = fsdp::fully_shard(*model, options_on(mesh));
    const auto before = sharded.full_parameters();
    loss_of(model).backward();
    of_torch.step();  // sees no gradient: those are in the shards
    const auto after = sharded.full_parameters();
    for (std::size_t i = 0; i < before.size(); ++i) check(after[i].second.equal(before[i].second), before[i].first);
  });
}

void shards_twice() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    Training training(mesh);
    expect("fully_shard", {"'0.weight'", "is sharded already"}, [&] { fsdp::fully_shard(*training.model, options_on(mesh)); });
    training.step();
  });
}

void converts_afterwards() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    Training training(mesh);
    const Parts promised = {"'0.weight' of unit '0'", "is sharded and can't be given other memory", "fully_unshard"};
    expect("to", promised, [&] { training.model->to(at::kDouble); });
    training.step();
  });
}

void requires_gradients_afterwards() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    auto model = make_model();
    model->parameters()[1].requires_grad_(false);
    fsdp::fully_shard(*model, options_on(mesh));
    model->parameters()[1].requires_grad_(true);
    expect("backward", {"'0.bias' of unit '0'", "did not require one"}, [&] { loss_of(model).backward(); });
  });
}

void drops_gradients_in_a_hook() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    Training training(mesh);
    auto x = training.model[0]->as<torch::nn::Linear>()->forward(at::ones({5, 4}));
    x.register_hook([&](const at::Tensor&) { training.optimizer.zero_grad(); });
    expect("zero_grad() in a hook", {"backward"}, [&] {
      for (std::size_t i = 1; i < training.model->size(); ++i) {
        if (auto* layer = training.model[i]->as<torch::nn::Linear>()) x = layer->forward(x);
      }
      x.sum().backward();
    });
    training.sharded.reset();
    training.step();
  });
}

void goes_back_twice() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    Training training(mesh);
    auto loss = loss_of(training.model);
    loss.backward({}, /*retain_graph=*/true);
    const auto once = training.sharded.full_gradients();
    loss.backward();
    const auto twice = training.sharded.full_gradients();
    for (std::size_t i = 0; i < once.size(); ++i) check(twice[i].second.allclose(once[i].second * 2), once[i].first + " adds up");
    expect<c10::Error>("a third time", {"backward through the graph a second time"}, [&] { loss.backward(); });
    training.optimizer.zero_grad();
    training.step();
  });
}

void goes_back_through_an_old_graph() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    Training training(mesh);
    const auto loss = loss_of(training.model);
    training.step();
    expect<c10::Error>("backward", {"modified by an inplace operation"}, [&] { loss.backward(); });
    training.optimizer.zero_grad();
    training.step();
  });
}

void steps_without_a_backward() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    Training training(mesh);
    const auto before = training.values();
    training.optimizer.step();
    training.optimizer.zero_grad();
    training.optimizer.step();
    expect_same("without gradients", training.values(), before);
  });
}

/// What a backward that failed has reduced already is dropped as well.
void resets_after_a_failed_backward() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    Training training(mesh);
    auto& model = training.model;
    const auto first = model[0]->as<torch::nn::Linear>()->forward(at::ones({5, 4})).tanh();
    first.register_hook([](const at::Tensor&) -> void { throw std::runtime_error("no"); });
    auto x = model[2]->as<torch::nn::Linear>()->forward(first).tanh();
    x = model[4]->as<torch::nn::Linear>()->forward(x);
    expect<std::runtime_error>("backward", {"no"}, [&] { x.sum().backward(); });
    training.sharded.reset();
    for (const auto& [name, gradient] : training.sharded.full_gradients()) check(!gradient.defined(), "gradient of " + name + " is left");
    training.step();
    Training calm(mesh);
    calm.step();
    expect_same("after a failed backward", training.values(), calm.values());
  });
}

void reads_by_pointers() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    if (mesh.size() == 1) return;  // [Alone] Nothing is freed.
    Training training(mesh);
    const auto weight = training.model->parameters()[0];
    expect<c10::Error>("data_ptr", {"freed while its unit is sharded"}, [&] { weight.data_ptr<float>(); });
    std::ostringstream stream;
    expect<c10::Error>("torch::save", {"freed while its unit is sharded"}, [&] { torch::save(training.model, stream); });
    training.step();
  });
}

void outlives_the_model() {
  run_misuse([](const fsdp::DeviceMesh& mesh) {
    auto training = std::make_optional<Training>(mesh);
    const auto weight = training->model->parameters()[0].detach();
    training.reset();
    expect("a view", {"is used after the model is gone"}, [&] { weight.sum(); });
  });
}

}  // namespace adversaries
