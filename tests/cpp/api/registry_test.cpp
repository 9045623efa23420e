// Which module is a unit of which model, when modules die and others take their addresses.

#include "api/registry.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace registry_test {

using testing::batch;
using testing::each_linear;
using testing::has;
using testing::line;
using testing::message_of;
using testing::Net;

/// Where modules are made one after the other.
struct Place {
  alignas(Net) std::byte bytes[sizeof(Net)];
  Net* make() { return new (bytes) Net; }
};

constexpr const char* kNoUnit = "is not a unit of a sharded model";

// A parameter's handle, or a graph, may keep the dead model's engine alive.
TEST(Registry, AModuleAtADeadOnesAddress) {
  testing::run_ranks(1, [] {
    Place place;
    auto* model = place.make();
    fully_shard(*model, {.mesh = line(), .units = each_linear()});
    EXPECT_EQ(handle(*model).unit(), 0U);
    const auto kept = model->second->weight;
    const auto* second = model->second.get();
    std::destroy_at(model);

    model = place.make();
    EXPECT_TRUE(has(message_of([&] { handle(*model); }), kNoUnit));
    EXPECT_NE(model->second.get(), nullptr);
    if (model->second.get() == second) {
      EXPECT_TRUE(has(message_of([&] { handle(*model->second); }), kNoUnit));
    }
    fully_shard(*model, {.mesh = line(), .units = each_linear()});
    EXPECT_EQ(handle(*model).engine()->units().size(), 4U);
    model->forward(batch(0)).sum().backward();
    EXPECT_TRUE(handle(*model).full_gradients().front().second.defined());
    std::destroy_at(model);
  });
}

TEST(Registry, ASharedModuleAtADeadOnesAddress) {
  testing::run_ranks(1, [] {
    std::vector<at::Tensor> kept;
    std::vector<const torch::nn::Module*> seen;
    std::size_t repeated = 0;
    for (int k = 0; k < 50; ++k) {
      const auto model = std::make_shared<Net>();
      for (const torch::nn::Module* module :
           {static_cast<torch::nn::Module*>(model.get()), static_cast<torch::nn::Module*>(model->first.get())}) {
        repeated += std::count(seen.begin(), seen.end(), module) > 0 ? 1U : 0U;
        EXPECT_TRUE(has(message_of([&] { handle(*module); }), kNoUnit)) << k;
        seen.push_back(module);
      }
      fully_shard(*model, {.mesh = line(), .units = each_linear()});
      EXPECT_EQ(handle(*model->first).unit(), 1U);
      kept.push_back(model->first->weight);
    }
    // Or this has shown nothing. AddressSanitizer keeps freed memory back, so that nothing repeats.
#ifndef FSDP_SANITIZED
    EXPECT_GT(repeated, 0U);
#endif
  });
}

// On the stack, nobody owns a module: its own parameters say whose unit it is.
TEST(Registry, AModuleThatNobodyOwns) {
  testing::run_ranks(1, [] {
    Net model;
    fully_shard(model, {.mesh = line(), .units = each_linear()});
    EXPECT_EQ(handle(model).unit(), 0U);
    EXPECT_EQ(handle(*model.third).unit(), 3U);
    model.forward(batch(0)).sum().backward();
    fully_unshard(model);
    EXPECT_TRUE(has(message_of([&] { handle(model); }), kNoUnit));
  });
}

}  // namespace registry_test
}  // namespace fsdp
