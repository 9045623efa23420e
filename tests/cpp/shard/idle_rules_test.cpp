// Rules of a division that make no unit: a predicate by the wrong type or name, a group without modules.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "fsdp/fsdp.h"
#include "support/collected_warnings.h"
#include "support/twins.h"

namespace fsdp {
namespace idle_rules_test {

using testing::each_linear;
using testing::has;
using testing::line;
using testing::make_net;
using testing::Net;
using testing::over_ranks;

/// What this rank is warned of when a model is sharded with these options.
std::string warning_of(const FullyShardOptions& options, const DeviceMesh& mesh) {
  const testing::CollectedWarnings warnings;
  const auto model = make_net();
  auto with_mesh = options;
  with_mesh.mesh = mesh;
  (void)fully_shard(*model, with_mesh);
  return warnings.text();
}

TEST(IdleRules, AreToldOnce) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto expect = [&](const FullyShardOptions& options, const std::string& text) {
      const auto warning = warning_of(options, mesh);
      EXPECT_EQ(has(warning, text), rank == 0) << warning;
      EXPECT_EQ(warning.empty(), rank != 0) << warning;
    };
    expect({.units = each<torch::nn::LayerNorm>()},
           "FullyShardOptions::units accepts no module, so that it makes no units, and what is in no other unit is gathered at once. The "
           "modules below the root are of the types torch::nn::LinearImpl.");
    expect({.units = [](const std::string& name, const torch::nn::Module&) { return name == "layers.0"; }}, "units accepts no module");
    expect({.units = each<torch::nn::LayerNorm>(), .unit_groups = {{"first", "second"}}}, "units accepts no module");
    expect({.unit_groups = {{"first"}, {}}}, "unit_groups has a group without modules");
    // What makes a unit, is a unit already, or was not given.
    EXPECT_EQ(warning_of({.units = each<torch::nn::Linear, torch::nn::LayerNorm>()}, mesh), "");
    EXPECT_EQ(warning_of({.units = each<Net>()}, mesh), "");
    EXPECT_EQ(warning_of({.units = each_linear(), .unit_groups = {{"first", "second", "third"}}}, mesh), "");
    EXPECT_EQ(warning_of({}, mesh), "");
  });
}

}  // namespace idle_rules_test
}  // namespace fsdp
