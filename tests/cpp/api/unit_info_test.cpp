#include "fsdp/unit_info.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace unit_info_test {

using testing::each_linear;
using testing::line;
using testing::make_net;
using testing::plane;

using Names = std::vector<std::string>;

TEST(UnitInfo, SaysWhatEachUnitHolds) {
  testing::run_ranks(2, [] {
    const auto model = make_net();
    model->third->bias.set_requires_grad(false);
    const auto format = std::make_shared<const GatherFormat>(float8_blocks(32));
    auto sharded = fully_shard(
        *model, {.mesh = line(),
                 .units = each_linear(),
                 .reshard_after_forward = false,
                 .gather_format = [&](const std::string& name, const at::Tensor&) { return name == "second.weight" ? format : nullptr; },
                 .unit_settings =
                     [](const std::string& name, const torch::nn::Module&) {
                       if (name != "second") return UnitSettings{};
                       return UnitSettings{
                           .reshard_after_forward = true,
                           .mixed_precision = MixedPrecisionPolicy{
                               .param_dtype = at::kBFloat16, .main_grads_dtype = at::kDouble, .grad_comm_dtype = at::kHalf}};
                     }});
    const auto units = sharded.units();
    ASSERT_EQ(units.size(), 4U);
    EXPECT_EQ(units[0].name, "(root)");
    EXPECT_EQ(units[0].parameters, Names{});
    EXPECT_EQ(units[0].whole_bytes, 0);
    EXPECT_TRUE(units[0].dtypes.empty());

    // 60 + 10 elements: weight and bias each begin at a multiple of 16, and the rest is cut in two at one.
    EXPECT_EQ(units[1].name, "first");
    EXPECT_EQ(units[1].parameters, (Names{"first.weight", "first.bias"}));
    EXPECT_EQ(units[1].whole_bytes, 96 * 4);
    EXPECT_EQ(units[1].shard_bytes, 48 * 4);
    EXPECT_EQ(units[1].dtypes, (std::vector<UnitDtypes>{UnitDtypes{}}));
    EXPECT_FALSE(units[1].reshard_after_forward);
    ASSERT_EQ(units[1].mesh.size(), 1U);
    EXPECT_EQ(units[1].mesh[0].name, "dp_shard");
    EXPECT_EQ(units[1].mesh[0].size, 2);

    EXPECT_EQ(units[2].name, "second");
    UnitDtypes own{.param = at::kBFloat16, .main_param = at::kFloat, .main_grad = at::kDouble, .grad_comm = at::kHalf};
    auto formatted = own;
    formatted.gather_format = true;
    EXPECT_EQ(units[2].dtypes, (std::vector<UnitDtypes>{formatted, own}));
    EXPECT_TRUE(units[2].reshard_after_forward);
    EXPECT_EQ(units[2].shard_bytes, units[2].whole_bytes * 2 / 2);  // half of the elements, twice as wide

    EXPECT_EQ(units[3].parameters, (Names{"third.weight", "third.bias"}));
    std::int64_t shard_bytes = 0;
    for (const auto& unit : units) shard_bytes += unit.shard_bytes;
    EXPECT_EQ(shard_bytes, sharded.memory_stats().main_parameters.live);

    // Of the model, whichever unit's handle is asked.
    EXPECT_EQ(handle(*model->third).units().size(), 4U);
    // What a setter changes.
    sharded.set_reshard_after_forward(true);
    EXPECT_TRUE(sharded.units()[1].reshard_after_forward);
  });
}

TEST(UnitInfo, SaysOverWhichMesh) {
  testing::run_ranks(4, [] {
    const auto model = make_net();
    const auto grid = plane();
    const auto other = init_device_mesh("cpu", {{"rows", 2}, {"columns", 2}});
    const auto sharded = fully_shard(*model, {.mesh = grid,
                                              .units = each_linear(),
                                              .unit_groups = {{"first", "third"}},
                                              .unit_settings = [&](const std::string& name, const torch::nn::Module&) {
                                                if (name == "second") return UnitSettings{.mesh = grid["dp_shard"]};
                                                if (name == "first") return UnitSettings{.mesh = other["columns"]};
                                                return UnitSettings{};
                                              }});
    const auto units = sharded.units();
    ASSERT_EQ(units.size(), 3U);
    ASSERT_EQ(units[0].mesh.size(), 2U);
    EXPECT_EQ(units[0].mesh[0].name, "dp_outer");
    EXPECT_EQ(units[0].mesh[1].name, "dp_shard");
    EXPECT_EQ(units[1].name, "first+third");
    EXPECT_EQ(units[1].parameters, (Names{"first.weight", "first.bias", "third.weight", "third.bias"}));
    ASSERT_EQ(units[1].mesh.size(), 1U);
    EXPECT_EQ(units[1].mesh[0].name, "");
    EXPECT_EQ(units[1].mesh[0].size, 2);
    ASSERT_EQ(units[2].mesh.size(), 1U);
    EXPECT_EQ(units[2].mesh[0].name, "dp_shard");
  });
}

TEST(UnitInfo, PrintsATable) {
  UnitInfo root{.name = "(root)", .parameters = {}, .whole_bytes = 0, .shard_bytes = 0, .dtypes = {}, .mesh = {{"dp_shard", 8}}};
  UnitInfo block{.name = "blocks.0",
                 .parameters = {"blocks.0.weight", "blocks.0.bias"},
                 .whole_bytes = 4096,
                 .shard_bytes = 1024,
                 .dtypes = {{.param = at::kBFloat16}, {.gather_format = true}},
                 .reshard_after_forward = false,
                 .mesh = {{"dp_outer", 2}, {"", 4}}};
  std::ostringstream text;
  text << std::vector{root, block};
  EXPECT_EQ(text.str(),
            "unit      parameters          whole bytes  shard bytes  reshard  mesh            dtypes: param, main, gradient, wire\n"
            "(root)             0                    0            0  yes      dp_shard=8\n"
            "blocks.0           2  4096 BFloat16+Float   1024 Float  no       dp_outer=2 x 4  BFloat16 Float Float Float; Float (gather "
            "format) Float Float Float\n"
            "all                2                 4096         1024\n");
  EXPECT_EQ(text.str(), to_string({root, block}));
}

}  // namespace unit_info_test
}  // namespace fsdp
