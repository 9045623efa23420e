// Plans of transfers, as arithmetic: each wanted element comes once, from a rank that has it, in messages of bounded size without hot
// spots.

#include "export/planned_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <iostream>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/error.h"
#include "support/messages.h"

namespace planned_messages_test {

using fsdp::ckpt::Box;
using fsdp::ckpt::numel;
using fsdp::ckpt::Shape;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::weights::HeldBox;
using fsdp::weights::plan_transfer;
using fsdp::weights::PlannedMessages;
using fsdp::weights::RankBoxes;
using fsdp::weights::SentBox;

constexpr std::int64_t kMessageBytes = std::int64_t{32} << 20;

/// Part `i` of `parts` along dimension `d`, as torch.chunk cuts. It may be empty.
Box chunk(const Shape& shape, std::size_t d, std::int64_t parts, std::int64_t i) {
  auto box = fsdp::ckpt::whole(shape);
  const auto step = (shape[d] + parts - 1) / parts;
  box.offsets[d] = std::min(shape[d], i * step);
  box.sizes[d] = std::min(shape[d], (i + 1) * step) - box.offsets[d];
  return box;
}

bool lies_in(const Box& inner, const Box& outer) { return fsdp::ckpt::intersection(inner, outer) == inner; }

/// How often a rank gets each element of a tensor in a dtype.
using Counts = std::map<std::tuple<int, std::string, at::ScalarType>, std::vector<int>>;

template <typename Visit>
void for_each_element(const Box& box, const Shape& shape, const Visit& visit) {
  for (std::int64_t i = 0; i < numel(box.sizes); ++i) {
    std::int64_t at = 0;
    std::int64_t rest = i;
    std::int64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0; stride *= shape[d]) {
      at += (box.offsets[d] + rest % box.sizes[d]) * stride;
      rest /= box.sizes[d];
    }
    visit(static_cast<std::size_t>(at));
  }
}

/// What holds for each plan, whatever the boxes are.
void check_messages(const PlannedMessages& plan, std::size_t ranks, std::int64_t message_bytes) {
  std::map<std::pair<std::int64_t, int>, int> senders, receivers;
  std::vector<std::int64_t> sent(ranks), received(ranks);
  std::int64_t round = 0;
  std::int64_t largest = 0;
  for (const auto& message : plan.messages) {
    EXPECT_GE(message.round, round);
    round = message.round;
    EXPECT_NE(message.sender, message.receiver);
    EXPECT_EQ((++senders[{round, message.sender}]), 1);
    EXPECT_EQ((++receivers[{round, message.receiver}]), 1);
    ++sent[static_cast<std::size_t>(message.sender)];
    ++received[static_cast<std::size_t>(message.receiver)];
    std::int64_t bytes = 0;
    for (const auto& box : message.boxes) {
      EXPECT_EQ(bytes % static_cast<std::int64_t>(c10::elementSize(box.dtype)), 0);
      bytes += box.bytes();
      largest = std::max(largest, box.bytes());
    }
    EXPECT_EQ(bytes, message.bytes);
    EXPECT_LE(bytes, plan.largest_bytes);
  }
  EXPECT_EQ(largest, plan.largest_bytes);
  EXPECT_LE(largest, message_bytes);
  const auto busiest = std::max(*std::ranges::max_element(sent), *std::ranges::max_element(received));
  EXPECT_EQ(plan.rounds, plan.messages.empty() ? 0 : round + 1);
  EXPECT_LT(plan.rounds, std::max<std::int64_t>(2 * busiest, 1));
}

/// Counts each element. For small tensors.
void check_elements(const PlannedMessages& plan, const std::vector<RankBoxes>& ranks) {
  std::map<std::string, Shape> shapes;
  for (const auto& rank : ranks) {
    for (const auto& held : rank.held) shapes[held.name] = held.shape;
  }
  Counts wanted, got;
  const auto counts_of = [&](Counts& counts, int rank, const std::string& name, at::ScalarType dtype) -> std::vector<int>& {
    auto& found = counts[{rank, name, dtype}];
    found.resize(static_cast<std::size_t>(numel(shapes[name])));
    return found;
  };
  const auto receive = [&](int sender, int receiver, const SentBox& box) {
    const auto& name = plan.names[box.tensor];
    const auto has_box = [&](const HeldBox& held) { return held.name == name && lies_in(box.box, held.box); };
    EXPECT_TRUE(std::ranges::any_of(ranks[static_cast<std::size_t>(sender)].held, has_box));
    auto& counts = counts_of(got, receiver, name, box.dtype);
    for_each_element(box.box, shapes[name], [&](std::size_t i) { ++counts[i]; });
  };
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& want : ranks[rank].wanted) {
      auto& counts = counts_of(wanted, static_cast<int>(rank), want.name, want.dtype);
      for_each_element(want.box, shapes[want.name], [&](std::size_t i) { counts[i] = 1; });
    }
  }
  for (const auto& message : plan.messages) {
    for (const auto& box : message.boxes) receive(message.sender, message.receiver, box);
  }
  for (const auto& own : plan.own) receive(own.rank, own.rank, own.box);
  std::erase_if(wanted, [](const auto& entry) { return std::ranges::count(entry.second, 1) == 0; });
  EXPECT_EQ(got, wanted);
}

PlannedMessages checked(const std::vector<RankBoxes>& ranks, std::int64_t message_bytes) {
  auto plan = plan_transfer(ranks, message_bytes);
  check_messages(plan, ranks.size(), message_bytes);
  check_elements(plan, ranks);
  return plan;
}

std::vector<std::int64_t> bytes_by_sender(const PlannedMessages& plan, std::size_t ranks) {
  std::vector<std::int64_t> bytes(ranks);
  for (const auto& message : plan.messages) bytes[static_cast<std::size_t>(message.sender)] += message.bytes;
  return bytes;
}

/// Trainers have chunks of rows.
void add_rows(std::vector<RankBoxes>& ranks, const std::string& name, const Shape& shape, std::int64_t trainers) {
  for (std::int64_t i = 0; i < trainers; ++i) {
    ranks[static_cast<std::size_t>(i)].held.push_back({name, shape, at::kFloat, chunk(shape, 0, trainers, i)});
  }
}

TEST(PlannedMessages, RowsToColumnsAndFusedRows) {
  std::vector<RankBoxes> ranks(6);
  for (const auto* name : {"q", "k", "v"}) add_rows(ranks, name, {8, 6}, 4);
  add_rows(ranks, "o", {9, 4}, 4);  // 3, 3, 3 and no rows
  for (int i = 0; i < 2; ++i) {
    auto& wanted = ranks[static_cast<std::size_t>(4 + i)].wanted;
    for (const auto* name : {"q", "k", "v"}) wanted.push_back({name, chunk({8, 6}, 0, 2, i), at::kFloat});
    wanted.push_back({"o", chunk({9, 4}, 1, 2, i), at::kBFloat16});
  }
  const auto plan = checked(ranks, 1 << 20);
  EXPECT_EQ(plan.largest_bytes, 2 * 6 * 4);
  const auto bytes = bytes_by_sender(plan, 6);
  EXPECT_EQ(bytes, (std::vector<std::int64_t>{168, 168, 168, 144, 0, 0}));
  EXPECT_TRUE(plan.own.empty());
}

TEST(PlannedMessages, BoxesAreDividedToFitMessages) {
  for (const std::int64_t message_bytes : {16, 40, 100, 4096}) {
    std::vector<RankBoxes> ranks(3);
    add_rows(ranks, "a", {6, 5, 7}, 2);
    add_rows(ranks, "b", {64}, 2);
    ranks[2].wanted = {{"a", {{1, 0, 2}, {4, 5, 5}}, at::kFloat}, {"b", {{3}, {61}}, at::kDouble}, {"b", {{0}, {64}}, at::kBFloat16}};
    checked(ranks, message_bytes);
  }
  EXPECT_TRUE(has(message_of([] { plan_transfer({}, 15); }), "at most 15 bytes"));
}

TEST(PlannedMessages, ARankGetsWhatItHasFromItself) {
  std::vector<RankBoxes> ranks(2);
  add_rows(ranks, "a", {6, 5}, 2);
  for (auto& rank : ranks) rank.wanted = {{"a", {{0, 0}, {6, 5}}, at::kBFloat16}};
  const auto plan = checked(ranks, 1 << 20);
  EXPECT_EQ(plan.own.size(), 2);
  EXPECT_EQ(plan.messages.size(), 2);
}

TEST(PlannedMessages, BoxesThatOverlapBringElementsOnce) {
  std::vector<RankBoxes> ranks(4);
  add_rows(ranks, "a", {6, 6}, 2);
  for (const std::size_t rank : {2, 3}) {
    ranks[rank].wanted = {{"a", {{0, 0}, {4, 4}}, at::kFloat},
                          {"a", {{2, 2}, {4, 4}}, at::kFloat},
                          {"a", {{2, 2}, {4, 4}}, at::kFloat},
                          {"a", {{1, 3}, {4, 2}}, at::kBFloat16}};
  }
  checked(ranks, 1 << 20);
}

TEST(PlannedMessages, ReplicasShareTheWork) {
  // Two replicas of two shards: each row on two ranks. A tensor that all have is sent by those that send less.
  std::vector<RankBoxes> ranks(6);
  for (int layer = 0; layer < 6; ++layer) {
    const auto name = "layer" + std::to_string(layer);
    for (int rank = 0; rank < 4; ++rank) {
      ranks[static_cast<std::size_t>(rank)].held.push_back({name, {8, 4}, at::kFloat, chunk({8, 4}, 0, 2, rank % 2)});
    }
    for (const std::size_t rank : {4, 5}) ranks[rank].wanted.push_back({name, {{0, 0}, {8, 4}}, at::kFloat});
  }
  for (std::size_t rank = 0; rank < 4; ++rank) ranks[rank].held.push_back({"norm", {16}, at::kFloat, {{0}, {16}}});
  for (const std::size_t rank : {4, 5}) ranks[rank].wanted.push_back({"norm", {{0}, {16}}, at::kFloat});
  const auto bytes = bytes_by_sender(checked(ranks, 64), 6);
  const auto all = std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
  EXPECT_EQ(all, 2 * (6 * 8 * 4 + 16) * 4);
  const auto [least, most] = std::minmax_element(bytes.begin(), bytes.begin() + 4);
  EXPECT_LE(*most - *least, 64);  // one box
}

TEST(PlannedMessages, TensorsWithoutDimensionsOrElements) {
  std::vector<RankBoxes> ranks(3);
  for (const std::size_t rank : {0, 1}) {
    ranks[rank].held = {{"count", {}, at::kLong, {{}, {}}}, {"empty", {0, 3}, at::kFloat, {{0, 0}, {0, 3}}}};
  }
  ranks[2].wanted = {{"count", {{}, {}}, at::kLong}, {"empty", {{0, 0}, {0, 3}}, at::kFloat}};
  EXPECT_EQ(checked(ranks, 16).messages.size(), 1);
  ranks[2].wanted.clear();
  EXPECT_EQ(checked(ranks, 16).rounds, 0);
}

TEST(PlannedMessages, RandomBoxes) {
  std::mt19937 random(7);
  const auto below = [&](std::int64_t end) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end)); };
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<RankBoxes> ranks(static_cast<std::size_t>(2 + below(6)));
    for (std::int64_t t = 0; t < 3; ++t) {
      const auto name = "t" + std::to_string(t);
      Shape shape;
      for (std::int64_t d = below(4); d > 0; --d) shape.push_back(1 + below(6));
      const auto shards = 1 + below(static_cast<std::int64_t>(ranks.size()));
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        const auto shard = static_cast<std::int64_t>(rank) % shards;
        const auto box = shape.empty() ? Box{} : chunk(shape, static_cast<std::size_t>(t) % shape.size(), shards, shard);
        ranks[rank].held.push_back({name, shape, at::kFloat, box});
      }
      for (auto count = below(6); count > 0; --count) {
        Box box;
        for (const auto size : shape) {
          box.offsets.push_back(below(size));
          box.sizes.push_back(below(size - box.offsets.back() + 1));
        }
        const auto dtype = below(2) == 0 ? at::kFloat : at::kBFloat16;
        ranks[static_cast<std::size_t>(below(static_cast<std::int64_t>(ranks.size())))].wanted.push_back({name, box, dtype});
      }
    }
    checked(ranks, 16 + below(100));
  }
}

TEST(PlannedMessages, WhatCannotBePlanned) {
  std::vector<RankBoxes> ranks(3);
  add_rows(ranks, "a", {6, 5}, 2);
  const auto text = [&](const std::string& name, Box box, at::ScalarType dtype) {
    auto all = ranks;
    all[2].wanted = {{name, std::move(box), dtype}};
    return message_of([&] { plan_transfer(all, 1 << 20); });
  };
  EXPECT_TRUE(has(text("b", {{0, 0}, {1, 1}}, at::kFloat), "rank 2 wants 'b', which no rank has"));
  for (const auto& box : {Box{{0, 0}, {7, 5}}, Box{{-1, 0}, {1, 5}}, Box{{0, 6}, {1, 0}}, Box{{0}, {6}}, Box{{1, 1}, {-1, 1}}}) {
    EXPECT_TRUE(has(text("a", box, at::kFloat), "of 'a', which has the shape [6, 5]"));
  }
  EXPECT_TRUE(has(text("a", {{0, 0}, {1, 1}}, at::kInt), "rank 2 wants 'a' in Int, but it is Float"));
  ranks[1].held.clear();
  EXPECT_TRUE(has(text("a", {{0, 1}, {6, 2}}, at::kFloat), "no rank has the box of sizes [3, 2] at [3, 1]"));
  add_rows(ranks, "a", {6, 4}, 2);
  EXPECT_TRUE(has(text("a", {{0, 0}, {1, 1}}, at::kFloat), "[6, 5] and the dtype Float on rank 0, but [6, 4] and Float on rank 0"));
}

/// Llama with 70 billion parameters: 64 ranks with rows in fp32, and an engine with 32 tensor-parallel ranks in bf16, where pairs of ranks
/// have the same heads of keys and values twice over.
TEST(PlannedMessages, Llama70B) {
  constexpr std::int64_t kTrainers = 64;
  constexpr std::int64_t kReceivers = 32;
  constexpr std::int64_t kHidden = 8192;
  constexpr std::int64_t kKeys = 8 * 128;
  std::vector<RankBoxes> ranks(kTrainers + kReceivers);
  std::int64_t wanted_bytes = 0;
  enum Cut { kRows, kColumns, kWhole, kHeads };
  const auto add = [&](const std::string& name, const Shape& shape, Cut cut) {
    add_rows(ranks, name, shape, kTrainers);
    for (std::int64_t i = 0; i < kReceivers; ++i) {
      auto box = fsdp::ckpt::whole(shape);
      if (cut == kRows) box = chunk(shape, 0, kReceivers, i);
      if (cut == kColumns) box = chunk(shape, 1, kReceivers, i);
      if (cut == kHeads) box = chunk(shape, 0, 8, i / 4);
      wanted_bytes += 2 * numel(box.sizes);
      ranks[static_cast<std::size_t>(kTrainers + i)].wanted.push_back({name, box, at::kBFloat16});
    }
  };
  add("model.embed_tokens.weight", {128256, kHidden}, kRows);
  for (int layer = 0; layer < 80; ++layer) {
    const auto prefix = "model.layers." + std::to_string(layer) + ".";
    add(prefix + "self_attn.q_proj.weight", {kHidden, kHidden}, kRows);
    add(prefix + "self_attn.k_proj.weight", {kKeys, kHidden}, kHeads);
    add(prefix + "self_attn.v_proj.weight", {kKeys, kHidden}, kHeads);
    add(prefix + "self_attn.o_proj.weight", {kHidden, kHidden}, kColumns);
    add(prefix + "mlp.gate_proj.weight", {28672, kHidden}, kRows);
    add(prefix + "mlp.up_proj.weight", {28672, kHidden}, kRows);
    add(prefix + "mlp.down_proj.weight", {kHidden, 28672}, kColumns);
    add(prefix + "input_layernorm.weight", {kHidden}, kWhole);
    add(prefix + "post_attention_layernorm.weight", {kHidden}, kWhole);
  }
  add("model.norm.weight", {kHidden}, kWhole);
  add("lm_head.weight", {128256, kHidden}, kRows);

  const auto begin = std::clock();
  const auto plan = plan_transfer(ranks, kMessageBytes);
  const auto seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  std::size_t boxes = 0;
  std::vector<std::int64_t> received(ranks.size());
  for (const auto& message : plan.messages) {
    boxes += message.boxes.size();
    received[static_cast<std::size_t>(message.receiver)] += message.bytes;
  }
  std::cout << "plan of a 70B Llama, 64 to 32 ranks: " << seconds << " s of a processor, " << boxes << " boxes in " << plan.messages.size()
            << " messages, " << plan.rounds << " rounds\n";

  check_messages(plan, ranks.size(), kMessageBytes);
  const auto sent = bytes_by_sender(plan, ranks.size());
  EXPECT_EQ(std::accumulate(sent.begin(), sent.end(), std::int64_t{0}), wanted_bytes);
  const auto [least, most] = std::minmax_element(sent.begin(), sent.begin() + kTrainers);
  EXPECT_LE(static_cast<double>(*most), 1.01 * static_cast<double>(*least));
  // Each byte once: what a receiver gets of a tensor are boxes that do not overlap, and as many elements as it wants.
  std::map<std::pair<int, std::size_t>, std::vector<Box>> got;
  for (const auto& message : plan.messages) {
    for (const auto& box : message.boxes) got[{message.receiver, box.tensor}].push_back(box.box);
  }
  for (std::size_t rank = kTrainers; rank < ranks.size(); rank += 13) {
    for (std::size_t t = 0; t < ranks[rank].wanted.size(); ++t) {
      const auto& wanted = ranks[rank].wanted[t];
      const auto& parts = got[{static_cast<int>(rank), t}];
      ASSERT_EQ(plan.names[t], wanted.name);
      std::int64_t elements = 0;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        EXPECT_TRUE(lies_in(parts[i], wanted.box));
        elements += numel(parts[i].sizes);
        for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(fsdp::ckpt::intersection(parts[i], parts[j]));
      }
      EXPECT_EQ(elements, numel(wanted.box.sizes));
    }
  }
  // No rank waits for another one much longer than its own messages take.
  const auto busiest = *std::ranges::max_element(received);
  EXPECT_LE(plan.rounds * plan.largest_bytes, 2 * busiest);
}

}  // namespace planned_messages_test
