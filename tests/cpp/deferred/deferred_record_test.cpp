// What deferred_init records: random numbers, what comes from outside, and values that constructors ask for.

#include "deferred/deferred_record.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/deferred_twins.h"
#include "support/twins.h"

namespace fsdp {
namespace deferred_record_test {

using testing::buffers_of;
using testing::expect_materialized_like_eager;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::message_of;
using testing::Net;
using testing::run_ranks;
using testing::values_of;
using testing::with_seed;

// Random numbers.

TEST(DeferredRecord, RandomOperators) {
  struct Model : torch::nn::Module {
    Model() {
      const torch::NoGradGuard no_grad;
      int count = 0;
      const auto keep = [&](const at::Tensor& value) { return register_parameter("p" + std::to_string(count++), value); };
      const auto normal = keep(at::randn({7}));
      keep(at::randn({5, 5}).mul_(3));
      keep(at::rand_like(normal));
      keep(at::randint(10, {6}).to(at::kFloat));
      keep(at::randperm(9).to(at::kFloat));
      keep(at::normal(normal, normal.abs()));
      keep(at::normal(0.5, normal.abs()));
      keep(at::bernoulli(normal.sigmoid()));
      keep(at::empty({11}).bernoulli_(0.3));
      keep(at::empty({11}).bernoulli_(at::full({11}, 0.3)));
      // How many numbers these draw depends on values.
      keep(at::poisson(normal.abs() * 10));
      keep(at::multinomial(normal.abs(), 20, true).to(at::kFloat));
      keep(at::_standard_gamma(normal.abs() + 0.1));
      keep(at::empty({3, 3}).exponential_());
      keep(at::empty({3, 3}).geometric_(0.2));
      keep(at::empty({3, 3}).cauchy_());
      keep(at::empty({3, 3}).log_normal_());
      keep(at::empty({3, 3}).random_(0, 100));
      keep(at::dropout(at::ones({20}), 0.4, true));
      keep(at::empty({6, 6}).t().narrow(0, 1, 3).normal_());
      at::randn({100});  // drawn, and dropped
      keep(at::randn({17}, at::kDouble));
      keep(at::randn({33}).to(at::kBFloat16));
      keep(at::randn({33}, at::kBFloat16));
    }
  };
  run_ranks(1, [] { expect_materialized_like_eager([] { return std::make_shared<Model>(); }); });
}

TEST(DeferredRecord, GeneratorsOfTheConstructorsOwn) {
  struct Model : torch::nn::Module {
    explicit Model(at::Generator outer) {
      auto inner = at::detail::createCPUGenerator(3);
      register_parameter("a", at::randn({4}, outer));
      register_parameter("b", at::empty({4}).normal_(0, 1, inner));
      torch::manual_seed(77);
      register_parameter("c", at::randn({4}));
      register_parameter("d", at::randn({4}, outer));
      register_parameter("e", at::randn({4}, inner));
    }
  };
  run_ranks(1, [] {
    auto generator = at::detail::createCPUGenerator(9);
    const auto plain = std::make_shared<Model>(generator);
    const auto next = at::rand({2}, generator);
    generator = at::detail::createCPUGenerator(9);
    const auto model = deferred_init([&] { return std::make_shared<Model>(generator); });
    EXPECT_TRUE(torch::equal(at::rand({2}, generator), next));
    materialize(*model);
    expect_same(values_of(*model), values_of(*plain), 0, "values");
  });
}

// What comes from outside.

TEST(DeferredRecord, TensorsFromOutside) {
  struct Model : torch::nn::Module {
    Model(const at::Tensor& given, const std::string& saved) {
      const torch::NoGradGuard no_grad;
      const auto noise = register_parameter("noise", at::randn({2, 2}));
      {
        std::vector<float> numbers = {1, 2, 3, 4};
        const auto blob = at::from_blob(numbers.data(), {2, 2});
        register_parameter("blob", at::empty({2, 2})).copy_(blob);
        register_parameter("product", blob.matmul(noise));
        blob.add_(1);  // later than they were taken
        numbers.assign(4, 100);
      }
      register_parameter("vector", torch::tensor(std::vector<double>{1.5, 2.5}, at::kFloat));
      register_parameter("nested", torch::tensor({{1.F, 2.F}, {3.F, 4.F}}));
      register_parameter("scalar", torch::tensor(7.5));
      std::stringstream file(saved);
      at::Tensor loaded;
      torch::load(loaded, file);
      register_parameter("loaded", loaded.clone().mul_(2));
      register_parameter("sum", at::zeros({5})).add_(loaded).mul_(noise[0][1]);
      // Random numbers into what has memory, between those into what has none.
      auto buffer = given.clone();
      buffer.normal_();
      register_buffer("buffer", buffer);
      register_parameter("after", at::randn({2}));
      buffer.mul_(noise[0]);
      register_parameter("of_buffer", at::randn({2}).mul_(buffer));
      register_parameter("expanded", at::ones({3, 2}) + buffer.expand({3, 2}));
    }
  };
  run_ranks(1, [] {
    const auto given = at::zeros({2});
    std::stringstream file;
    torch::save(at::arange(5, at::kFloat), file);
    expect_materialized_like_eager([&] { return std::make_shared<Model>(given, file.str()); }, /*all_deferred=*/false);
  });
}

TEST(DeferredRecord, TablesFilledByPointers) {
  struct Model : torch::nn::Module {
    Model() {
      auto positions = at::zeros({4, 6});
      auto table = positions.accessor<float, 2>();
      for (int i = 0; i < 4; ++i) table[i][i] = static_cast<float>(i);
      register_buffer("positions", positions);
      auto empty = at::empty({3});
      for (int i = 0; i < 3; ++i) empty.data_ptr<float>()[i] = 0.5F * static_cast<float>(i);
      register_buffer("scaled", empty * 2);
      const auto filled = register_parameter("filled", at::ones({5}));
      filled.data_ptr<float>()[2] = 9;
      auto range = at::arange(6, at::kFloat);
      range.data_ptr<float>()[0] = -1;
      const torch::NoGradGuard no_grad;
      register_parameter("copied", at::randn({6})).add_(range);
    }
  };
  const auto make = [] { return std::make_shared<Model>(); };
  run_ranks(1, [&] { expect_materialized_like_eager(make, /*all_deferred=*/false); });
  run_ranks(2, [&] {
    auto [plain, numbers] = with_seed(make);
    auto [model, same_numbers] = with_seed([&] { return deferred_init(make); });
    auto sharded = fully_shard(*model, {.mesh = line()});
    expect_same(sharded.full_parameters(), values_of(*plain), 0, "parameters");
    expect_same(buffers_of(*model), buffers_of(*plain), 0, "buffers");
  });
}

// Constructors that look at values.

TEST(DeferredRecord, ValuesThatAreAskedForAreComputed) {
  struct Model : torch::nn::Module {
    Model() {
      const auto rates = at::linspace(0, 0.3, 4);
      for (int i = 0; i < 4; ++i) scale += rates[i].item<double>();
      const torch::NoGradGuard no_grad;
      auto weight = register_parameter("weight", at::randn({6, 4}));
      weight.div_(weight.norm().item<double>() * scale);
      if (torch::equal(weight, weight.abs())) weight.neg_();
      const auto positive = weight.index({weight.gt(0)});
      register_parameter("positive", positive.clone());
      register_parameter("rows", weight.index_select(0, at::nonzero(weight.select(1, 0)).flatten().narrow(0, 0, 2)));
      weight.index_put_({weight.lt(0)}, 0.25);
      register_parameter("unique", std::get<0>(at::_unique(weight)));
      register_parameter("after", at::randn({3}));
    }
    double scale = 0;
  };
  run_ranks(1, [] { expect_materialized_like_eager([] { return std::make_shared<Model>(); }); });
  run_ranks(1, [] {
    auto [plain, numbers] = with_seed([] { return std::make_shared<Net>(); });
    auto [model, same_numbers] = with_seed([] { return deferred_init([] { return std::make_shared<Net>(); }); });
    EXPECT_EQ(model->first->weight.norm().item<double>(), plain->first->weight.norm().item<double>());
    EXPECT_TRUE(is_deferred(model->first->weight));
  });
}

TEST(DeferredRecord, AddressesAreAnError) {
  run_ranks(1, [] {
    const auto message = [](const auto& look) { return message_of<c10::Error>([&] { deferred_init(look); }); };
    const auto print = message([] {
      std::ostringstream text;
      text << at::randn({3}).mul_(2);
      return 0;
    });
    EXPECT_TRUE(has(print, "inside of fsdp::deferred_init and has no memory") && has(print, "item() works")) << print;
    EXPECT_TRUE(has(message([] { return at::randn({3}).mul_(2).data_ptr<float>() == nullptr; }), "has no memory"));
    EXPECT_TRUE(has(message([] { return at::randn({3}).mul(2).const_data_ptr<float>() == nullptr; }), "has no memory"));
    const auto model = deferred_init([] { return std::make_shared<Net>(); });
    EXPECT_TRUE(has(message_of<c10::Error>([&] { (void)model->first->weight.data_ptr<float>(); }), "has no memory"));
  });
}

TEST(DeferredRecord, RefusesWhatItCannotRecord) {
  run_ranks(1, [] {
    const auto refusal = [](const auto& make) { return message_of<std::exception>([&] { deferred_init(make); }); };
    const auto device = refusal([] { return at::zeros({3}, at::kCUDA); });
    EXPECT_TRUE(has(device, "'aten::zeros'") && has(device, "cuda") && has(device, "build the model on the CPU")) << device;
    const auto sparse = refusal([] { return at::ones({3, 3}).to_sparse(); });
    EXPECT_TRUE(has(sparse, "to_sparse") && has(sparse, "not dense")) << sparse;
    EXPECT_TRUE(has(refusal([] { return at::zeros({2, 3}).mm(at::zeros({2, 3})); }), "cannot be multiplied"));
    // As autograd does.
    EXPECT_TRUE(has(refusal([] { return torch::nn::Linear(2, 3)->weight.mul_(2); }), "leaf Variable that requires grad"));
    const auto shard = refusal([] {
      auto model = std::make_shared<Net>();
      fully_shard(*model);
      return model;
    });
    EXPECT_TRUE(has(shard, "inside of deferred_init")) << shard;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    EXPECT_TRUE(has(refusal([] { return 0; }), "autocast"));
    at::autocast::set_autocast_enabled(at::kCPU, false);
    // Nothing of it remains.
    EXPECT_FALSE(is_deferred(at::zeros({3})));
    EXPECT_EQ(at::ones({3}).sum().item<float>(), 3);
  });
}

}  // namespace deferred_record_test
}  // namespace fsdp
