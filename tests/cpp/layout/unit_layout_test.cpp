#include "layout/unit_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/error.h"
#include "support/layout_checks.h"
#include "support/messages.h"

namespace fsdp::layout {
namespace unit_layout_test {

// The standard's distributions differ between libraries; a seed must give the same cases everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int64_t from_to(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool one_in(std::int64_t n) { return from_to(1, n) == 1; }

 private:
  std::mt19937_64 engine_;
};

Shape random_shape(Random& random) {
  if (random.one_in(12)) return {random.from_to(300, 1200)};  // larger than the shards
  if (random.one_in(12)) return {1, random.from_to(2, 300)};  // a single row
  Shape shape(static_cast<std::size_t>(random.from_to(0, 4)));
  // Sizes repeat often, so that rows of equal size meet.
  for (auto& size : shape) size = random.one_in(12) ? 0 : random.one_in(6) ? random.from_to(1, 17) : random.from_to(1, 4);
  return shape;
}

Granularity random_granularity(Random& random) {
  switch (random.from_to(0, 3)) {
    case 0:
      return Granularity::element();
    case 1:
      return Granularity::rows();
    case 2:
      return Granularity::blocks(random.one_in(2) ? 8 : random.from_to(1, 70));
    default:
      return Granularity::whole();
  }
}

std::vector<ParameterTraits> random_parameters(Random& random) {
  const std::int64_t count = random.one_in(10) ? random.from_to(0, 40) : random.from_to(0, 9);
  // Half of the units have one granularity and few dtypes, so that sub-buffers with many parameters are common.
  const bool uniform = random.one_in(2);
  const Granularity granularity = random_granularity(random);
  const std::int64_t dtypes = uniform ? random.from_to(1, 2) : static_cast<std::int64_t>(std::size(kDtypes));
  const std::int64_t frozen_one_in = random.from_to(1, 12);  // 1: all
  std::vector<ParameterTraits> parameters;
  for (std::int64_t i = 0; i < count; ++i) {
    // One draw per statement: the order in which arguments are evaluated is the compiler's choice.
    auto shape = random_shape(random);
    const auto own_granularity = uniform ? granularity : random_granularity(random);
    const auto dtype = kDtypes[random.from_to(0, dtypes - 1)];
    const bool trainable = !random.one_in(frozen_one_in);
    parameters.push_back(spec("p" + std::to_string(i), std::move(shape), own_granularity, dtype, trainable));
  }
  return parameters;
}

std::int64_t random_world_size(Random& random) {
  if (random.one_in(20)) return random.from_to(65, 400);
  return random.one_in(4) ? random.from_to(10, 64) : random.from_to(1, 9);
}

// Case i is made from seed + i: to run a failed case alone, set FSDP_TEST_SEED to its seed and stop at the first failure.
TEST(UnitLayout, AgreesWithTheReferenceOnRandomUnits) {
  constexpr std::uint64_t kCases = 6000;
  const char* const given = std::getenv("FSDP_TEST_SEED");
  const std::uint64_t seed = given == nullptr ? 20260713 : std::strtoull(given, nullptr, 10);
  std::cout << kCases << " cases from FSDP_TEST_SEED=" << seed << std::endl;
  for (std::uint64_t i = 0; i < kCases; ++i) {
    Random random(seed + i);
    const auto parameters = random_parameters(random);
    const std::int64_t world_size = random_world_size(random);
    SCOPED_TRACE("FSDP_TEST_SEED=" + std::to_string(seed + i) + ": " + describe(parameters, world_size));
    check(parameters, world_size);
    if (HasFailure()) return;
  }
}

double padding_ratio(const UnitLayout& layout) {
  return static_cast<double>(layout.full_bytes()) / static_cast<double>(payload_bytes(layout.parameters()));
}

std::vector<ParameterTraits> gpt_block(Granularity granularity) {
  constexpr std::int64_t d = 512;
  const auto make = [&](const char* name, Shape shape) { return spec(name, std::move(shape), granularity); };
  return {make("ln_1.weight", {d}),
          make("ln_1.bias", {d}),
          make("attn.qkv.weight", {3 * d, d}),
          make("attn.qkv.bias", {3 * d}),
          make("attn.proj.weight", {d, d}),
          make("attn.proj.bias", {d}),
          make("ln_2.weight", {d}),
          make("ln_2.bias", {d}),
          make("mlp.up.weight", {4 * d, d}),
          make("mlp.up.bias", {4 * d}),
          make("mlp.down.weight", {d, 4 * d}),
          make("mlp.down.bias", {d})};
}

std::vector<ParameterTraits> llama_2_7b_layer(Granularity granularity, Dtype dtype = kBFloat16) {
  constexpr std::int64_t d = 4096, ffn = 11008;
  const auto make = [&](const char* name, Shape shape) { return spec(name, std::move(shape), granularity, dtype); };
  return {make("self_attn.q_proj.weight", {d, d}), make("self_attn.k_proj.weight", {d, d}), make("self_attn.v_proj.weight", {d, d}),
          make("self_attn.o_proj.weight", {d, d}), make("mlp.gate_proj.weight", {ffn, d}),  make("mlp.up_proj.weight", {ffn, d}),
          make("mlp.down_proj.weight", {d, ffn}),  make("input_layernorm.weight", {d}),     make("post_attention_layernorm.weight", {d})};
}

// The alternative that the sub-buffers replace: one buffer for all row sizes, with shards that are multiples of all of them.
double common_multiple_ratio(const std::vector<ParameterTraits>& parameters, std::int64_t world_size) {
  std::int64_t multiple = 1, end = 0, payload = 0;
  for (const auto& parameter : parameters) {
    const std::int64_t row = reference::quantum(parameter), numel = product(parameter.shape);
    multiple = std::lcm(multiple, row);
    end = (end + row - 1) / row * row + numel;
    payload += numel;
  }
  const std::int64_t per_rank = multiple * world_size;
  return static_cast<double>((end + per_rank - 1) / per_rank * per_rank) / static_cast<double>(payload);
}

// Too large for the reference: every parameter is owned piece by piece, in order, without gaps.
void check_parts(const UnitLayout& layout) {
  for (std::size_t p = 0; p < layout.parameters().size(); ++p) {
    SCOPED_TRACE(layout.parameters()[p].name);
    const auto& position = layout.positions()[p];
    const auto& buffer = layout.sub_buffers()[position.sub_buffer];
    std::int64_t owned = 0;
    for (std::int64_t rank = 0; rank < layout.world_size(); ++rank) {
      const auto slice = layout.local_slice(p, rank);
      if (slice.numel == 0) continue;
      ASSERT_EQ(slice.parameter_offset, owned) << "rank " << rank;
      ASSERT_EQ(rank * buffer.shard_numel + slice.shard_offset, position.offset + owned) << "rank " << rank;
      ASSERT_LE(slice.shard_offset + slice.numel, buffer.shard_numel) << "rank " << rank;
      owned += slice.numel;
    }
    ASSERT_EQ(owned, product(layout.parameters()[p].shape));
  }
}

TEST(UnitLayout, CutsRowsOfAGptBlockWithoutPadding) {
  const auto parameters = gpt_block(Granularity::rows());
  const UnitLayout layout(parameters, 512);
  ASSERT_EQ(layout.sub_buffers().size(), 3U);  // rows of 1, 512 and 2,048 elements
  EXPECT_EQ(layout.padding_bytes(), 0);
  EXPECT_LT(1.32 * padding_ratio(layout), common_multiple_ratio(parameters, 512));
  check_parts(layout);
}

TEST(UnitLayout, PadsAGptBlockOnlyWhereRanksOutnumberRows) {
  // 512 rows of 2,048 over 1,024 ranks: half of the ranks own none of them. Nothing that keeps rows whole in equal shards does better.
  const UnitLayout rows(gpt_block(Granularity::rows()), 1024);
  const auto& wide = rows.sub_buffers()[2];
  ASSERT_EQ(wide.quantum, 2048);
  EXPECT_EQ(wide.shard_numel, 2048);
  EXPECT_EQ(rows.local_slice(10, 511).numel, 2048);
  EXPECT_EQ(rows.local_slice(10, 512), LocalSlice{});
  // Cutting anywhere costs less than one alignment per rank and parameter.
  const UnitLayout elements(gpt_block(Granularity::element()), 1024);
  EXPECT_EQ(elements.sub_buffers().size(), 1U);
  EXPECT_LT(elements.padding_bytes(), (1024 + 12) * kAlignment);
}

TEST(UnitLayout, CutsRowsOfALlamaLayerOver1024RanksWithOnePercentOfPadding) {
  const auto parameters = llama_2_7b_layer(Granularity::rows());
  const UnitLayout layout(parameters, 1024);
  ASSERT_EQ(layout.sub_buffers().size(), 3U);  // rows of 4,096, of 11,008 and of 1 element
  // 38,400 rows of 4,096 are 37.5 per rank, so 1,024 half rows are padding; the other two divide.
  EXPECT_EQ(layout.padding_bytes(), 1024 / 2 * 4096 * 2);
  EXPECT_LT(padding_ratio(layout), 1.011);
  EXPECT_LT(1.75 * padding_ratio(layout), common_multiple_ratio(parameters, 1024));
  check_parts(layout);
}

TEST(UnitLayout, NeverPadsToACommonMultipleOfOddRows) {
  // Coprime rows: their common multiple has 1.3e8 elements, a thousand times the parameters.
  std::vector<ParameterTraits> parameters;
  for (const std::int64_t row : {509, 511, 513})
    parameters.push_back(spec("rows_of_" + std::to_string(row), {64, row}, Granularity::rows()));
  EXPECT_EQ(UnitLayout(parameters, 8).padding_bytes(), 0);
  EXPECT_LT(1000 * padding_ratio(UnitLayout(parameters, 8)), common_multiple_ratio(parameters, 8));
  check(parameters, 8);
  check(parameters, 7);
}

// A common multiple of 64 bytes and the blocks of a gather format, say: parameters start and shards end at its multiples, also where it is
// no power of two. Rows and blocks are cut at their own.
TEST(UnitLayout, AlignsWholeAndUncutParametersAsToldTo) {
  for (const std::int64_t alignment : {16, 48, 80, 1040}) {
    for (const auto granularity : {Granularity::element(), Granularity::whole()}) {
      std::vector<ParameterTraits> parameters = {spec("a", {5, 13}, granularity), spec("b", {1}, granularity),
                                                 spec("c", {4001}, granularity)};
      for (auto& parameter : parameters) parameter.alignment = alignment;
      for (const std::int64_t world_size : {1, 3, 8}) {
        const UnitLayout layout(parameters, world_size);
        ASSERT_EQ(layout.sub_buffers().size(), 1U);
        EXPECT_EQ(layout.sub_buffers()[0].quantum, alignment);
        EXPECT_EQ(layout.sub_buffers()[0].shard_numel % alignment, 0);
        for (const auto& position : layout.positions()) EXPECT_EQ(position.offset % alignment, 0);
        check_parts(layout);
        // No more than that: of cut ones, each parameter's and each shard's end is rounded up once.
        if (granularity.kind == Granularity::Kind::kElement) {
          EXPECT_LT(layout.padding_bytes(), (3 + world_size) * alignment * 4 + kAlignment);
        }
      }
    }
    std::vector<ParameterTraits> rows = {spec("rows", {6, 7}, Granularity::rows()), spec("blocks", {40}, Granularity::blocks(10))};
    for (auto& parameter : rows) parameter.alignment = alignment;
    const UnitLayout layout(rows, 2);
    EXPECT_EQ(layout.sub_buffers()[0].quantum, 7);
    EXPECT_EQ(layout.sub_buffers()[1].quantum, 10);
  }
  // Parameters that are to be aligned differently do not share a sub-buffer.
  std::vector<ParameterTraits> parameters = {spec("a", {100}), spec("b", {100}), spec("c", {100})};
  parameters[1].alignment = 48;
  const UnitLayout layout(parameters, 4);
  ASSERT_EQ(layout.sub_buffers().size(), 2U);
  EXPECT_EQ(layout.positions()[0].sub_buffer, layout.positions()[2].sub_buffer);
}

TEST(UnitLayout, TakesOddShapes) {
  for (const auto granularity : {Granularity::element(), Granularity::rows(), Granularity::blocks(12), Granularity::whole()}) {
    const std::vector<ParameterTraits> parameters = {
        spec("scalar", {}, granularity),      spec("no_elements", {0}, granularity),        spec("rows_of_nothing", {5, 0}, granularity),
        spec("no_rows", {0, 7}, granularity), spec("single_row", {1, 1000}, granularity),   spec("single_element", {1}, granularity),
        spec("large", {401, 3}, granularity), spec("last_is_empty", {3, 0, 2}, granularity)};
    for (const std::int64_t world_size : {1, 2, 7, 64, 3000}) {
      SCOPED_TRACE(describe(parameters, world_size));
      check(parameters, world_size);
    }
  }
}

TEST(UnitLayout, PutsRowsOfNothingWithRowsOfOne) {
  const UnitLayout layout({spec("empty", {5, 0}, Granularity::rows()), spec("bias", {3}, Granularity::rows())}, 2);
  ASSERT_EQ(layout.sub_buffers().size(), 1U);
  EXPECT_EQ(layout.sub_buffers()[0].quantum, 1);
  EXPECT_EQ(layout.positions()[0].numel, 0);
}

TEST(UnitLayout, TakesNoParameters) {
  for (const std::int64_t world_size : {1, 16384}) {
    const UnitLayout layout({}, world_size);
    EXPECT_TRUE(layout.sub_buffers().empty());
    EXPECT_EQ(layout.full_bytes(), 0);
    EXPECT_EQ(layout.shard_bytes(), 0);
    EXPECT_EQ(layout.padding_bytes(), 0);
    EXPECT_EQ(layout.trainable_sub_buffers(), 0U);
  }
}

TEST(UnitLayout, GivesLaterRanksNothingWhereRanksOutnumberElements) {
  const UnitLayout layout({spec("bias", {3}, Granularity::rows())}, 5);
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(layout.local_slice(0, rank), (LocalSlice{.parameter_offset = rank, .shard_offset = 0, .numel = 1}));
  }
  for (std::int64_t rank = 3; rank < 5; ++rank) EXPECT_EQ(layout.local_slice(0, rank), LocalSlice{});
}

TEST(UnitLayout, CutsOneParameterIntoShardsOfManyRanks) {
  // 10 rows of 6 over 4 ranks: 3, 3, 3 and 1.
  const UnitLayout layout({spec("weight", {10, 2, 3}, Granularity::rows())}, 4);
  EXPECT_EQ(layout.local_slice(0, 0), (LocalSlice{.parameter_offset = 0, .shard_offset = 0, .numel = 18}));
  EXPECT_EQ(layout.local_slice(0, 2), (LocalSlice{.parameter_offset = 36, .shard_offset = 0, .numel = 18}));
  EXPECT_EQ(layout.local_slice(0, 3), (LocalSlice{.parameter_offset = 54, .shard_offset = 0, .numel = 6}));
}

TEST(UnitLayout, StartsEveryParameterAtABlock) {
  const UnitLayout layout({spec("a", {5}, Granularity::blocks(4)), spec("b", {9}, Granularity::blocks(4))}, 2);
  EXPECT_EQ(layout.positions()[1].offset, 8);
  EXPECT_EQ(layout.sub_buffers()[0].shard_numel, 12);  // 17 elements in two halves of 8.5, rounded up to a block
  EXPECT_EQ(layout.local_slice(1, 0), (LocalSlice{.parameter_offset = 0, .shard_offset = 8, .numel = 4}));
  EXPECT_EQ(layout.local_slice(1, 1), (LocalSlice{.parameter_offset = 4, .shard_offset = 0, .numel = 5}));
}

TEST(UnitLayout, SpreadsWholeParametersEvenly) {
  std::vector<ParameterTraits> parameters;
  for (const std::int64_t rows : {2, 3, 7, 3, 4, 5}) {
    parameters.push_back(spec("w" + std::to_string(parameters.size()), {rows, 16}, Granularity::whole()));
  }
  // Largest first: 7 to rank 0, 5 to rank 1, 4 to rank 2, 3 on top of the 4, 3 on top of the 5. Now the ranks have 7, 8 and 7, and the 2
  // goes to rank 0, the lower of the two that have least.
  const UnitLayout layout(parameters, 3);
  const std::int64_t ranks[] = {0, 2, 0, 1, 2, 1};
  EXPECT_EQ(layout.sub_buffers()[0].shard_numel, 9 * 16);
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    EXPECT_EQ(layout.local_slice(p, ranks[p]).numel, product(parameters[p].shape)) << parameters[p].name;
  }
  EXPECT_EQ(layout.local_slice(1, 2).shard_offset, 4 * 16);
}

TEST(UnitLayout, BreaksTiesOfWholeParametersByOrder) {
  std::vector<ParameterTraits> parameters;
  for (int i = 0; i < 5; ++i) parameters.push_back(spec("w" + std::to_string(i), {4, 4}, Granularity::whole()));
  const UnitLayout layout(parameters, 4);
  for (std::size_t p = 0; p < parameters.size(); ++p) EXPECT_EQ(layout.local_slice(p, static_cast<std::int64_t>(p) % 4).numel, 16) << p;
  EXPECT_EQ(layout.local_slice(4, 0).shard_offset, 16);
}

TEST(UnitLayout, LaysGradientsOutAsTheTrainablePrefix) {
  const std::vector<ParameterTraits> mixed = {spec("frozen", {100, 3}, Granularity::rows(), kBFloat16, false), spec("norm", {7}),
                                              spec("quantized", {33}, {}, kInt8, false), spec("weight", {9, 5}, Granularity::rows()),
                                              spec("frozen_norm", {7}, {}, kFloat, false)};
  const std::vector<ParameterTraits> trainable = {mixed[1], mixed[3]};
  const UnitLayout all(mixed, 3), gradients(trainable, 3);
  EXPECT_EQ(all.trainable_sub_buffers(), 2U);
  EXPECT_EQ(all.trainable_bytes(), gradients.full_bytes());
  EXPECT_EQ(all.trainable_shard_bytes(), gradients.shard_bytes());
  for (std::size_t i = 0; i < trainable.size(); ++i) {
    const auto& a = all.positions()[2 * i + 1];
    const auto& b = gradients.positions()[i];
    EXPECT_EQ(a.sub_buffer, b.sub_buffer);
    EXPECT_EQ(a.offset, b.offset);
    EXPECT_EQ(all.sub_buffers()[a.sub_buffer].byte_offset, gradients.sub_buffers()[b.sub_buffer].byte_offset);
  }
  EXPECT_GT(all.full_bytes(), all.trainable_bytes());
  check(mixed, 3);
}

TEST(UnitLayout, Takes16384Ranks) {
  for (const auto granularity : {Granularity::element(), Granularity::rows(), Granularity::blocks(128), Granularity::whole()}) {
    const UnitLayout layout(llama_2_7b_layer(granularity), 16384);
    check_parts(layout);
    EXPECT_EQ(layout.padding_bytes(), layout.full_bytes() - payload_bytes(layout.parameters()));
  }
}

TEST(UnitLayout, TakesParametersBeyond32BitsOfElements) {
  const Shape experts = {256, 7168, 8192};  // 1.5e10 elements
  for (const auto granularity : {Granularity::element(), Granularity::rows(), Granularity::blocks(32), Granularity::whole()}) {
    const UnitLayout layout({spec("up", experts, granularity), spec("gate", experts, granularity), spec("bias", {256}, granularity)}, 1000);
    check_parts(layout);
  }
}

std::string error_of(const std::vector<ParameterTraits>& parameters, std::int64_t world_size) {
  return testing::message_of([&] { const UnitLayout layout(parameters, world_size); });
}

void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const auto& word : words) EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
}

TEST(UnitLayout, NamesTheParameterThatItCannotTake) {
  const auto good = spec("good", {4, 4});
  expect_words(error_of({good, spec("layers.0.weight", {4, -2})}, 2), {"'layers.0.weight'", "negative", "-2"});
  expect_words(error_of({good, spec("layers.0.weight", {4}, {}, {6, 3})}, 2), {"'layers.0.weight'", "3 bytes", "1, 2, 4, 8 or 16"});
  expect_words(error_of({good, spec("layers.0.weight", {4}, Granularity::blocks(0))}, 2),
               {"'layers.0.weight'", "blocks of 0", "at least 1"});
  expect_words(error_of({good, spec("layers.0.weight", {4}, Granularity::blocks(-8))}, 2), {"'layers.0.weight'", "blocks of -8"});
}

TEST(UnitLayout, RefusesSizesThatDoNotFit) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 32;
  const auto good = spec("good", {4, 4});
  expect_words(error_of({good, spec("layers.0.weight", {kLarge, kLarge})}, 2), {"'layers.0.weight'", "larger than 2^63 - 1 bytes"});
  expect_words(error_of({good, spec("layers.0.weight", {kLarge, kLarge / 4})}, 2), {"'layers.0.weight'", "over 2 rank(s)", "2^63 - 1"});
}

TEST(UnitLayout, RefusesAWorldWithoutRanks) {
  for (const std::int64_t world_size : {0, -1}) {
    expect_words(error_of({spec("weight", {4})}, world_size), {std::to_string(world_size) + " ranks", "at least"});
  }
}

}  // namespace unit_layout_test
}  // namespace fsdp::layout
