// The program's own values: dictionaries and None, to and from Python's DCP; by name.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "fsdp/fsdp.h"
#include "support/checkpoint_test.h"
#include "support/edited_checkpoint.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/python_peer.h"
#include "support/same_bits.h"
#include "test_paths.h"

namespace extra_test {

using fsdp::ExtraDict;
using fsdp::ExtraList;
using fsdp::ExtraNone;
using fsdp::ExtraState;
using fsdp::ExtraValue;
using fsdp::get_extra;
using fsdp::testing::has;
using fsdp::testing::line;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;

using Extra = fsdp::testing::CheckpointTest;

/// As extra_values() of tests/cpp/peers/state_peer.py.
ExtraState values() {
  const ExtraDict warm{{{"on", true}, {"order", at::arange(4)}}};
  return {{"step", std::int64_t{7}},
          {"best", ExtraNone()},
          {"scheduler", ExtraDict{{{"last_epoch", std::int64_t{3}}, {"base_lrs", ExtraList{{0.5, 0.25}}}, {"warm", warm}}}},
          {"seen", ExtraList{{std::int64_t{1}, ExtraNone(), ExtraDict{{{"file", std::string("a.txt")}, {"line", std::int64_t{12}}}}}}},
          {"tensors", ExtraList{{at::ones({2}), ExtraList{{at::zeros({1}), std::string("x")}}}}},
          {"nothing", ExtraList{}}};
}

void expect_same(const ExtraValue& found, const ExtraValue& expected, const std::string& name) {
  ASSERT_EQ(found.index(), expected.index()) << name;
  if (const auto* dict = std::get_if<ExtraDict>(&expected)) {
    const auto& items = std::get<ExtraDict>(found).items;
    ASSERT_EQ(items.size(), dict->items.size()) << name;
    for (const auto& [key, item] : dict->items) {
      ASSERT_TRUE(items.contains(key)) << name << "." << key;
      expect_same(items.at(key), item, name + "." + key);
    }
  } else if (const auto* list = std::get_if<ExtraList>(&expected)) {
    const auto& items = std::get<ExtraList>(found).items;
    ASSERT_EQ(items.size(), list->items.size()) << name;
    for (std::size_t i = 0; i < items.size(); ++i) expect_same(items[i], list->items[i], name + "." + std::to_string(i));
  } else if (const auto* tensor = std::get_if<at::Tensor>(&expected)) {
    EXPECT_TRUE(fsdp::testing::same_bits(std::get<at::Tensor>(found), *tensor)) << name;
  } else if (const auto* whole = std::get_if<std::int64_t>(&expected)) {
    EXPECT_EQ(std::get<std::int64_t>(found), *whole) << name;
  } else if (const auto* real = std::get_if<double>(&expected)) {
    EXPECT_EQ(std::get<double>(found), *real) << name;
  } else if (const auto* text = std::get_if<std::string>(&expected)) {
    EXPECT_EQ(std::get<std::string>(found), *text) << name;
  } else if (const auto* on = std::get_if<bool>(&expected)) {
    EXPECT_EQ(std::get<bool>(found), *on) << name;
  }
}

void expect_same(const ExtraState& found, const ExtraState& expected) {
  expect_same(ExtraValue(ExtraDict{found}), ExtraValue(ExtraDict{expected}), "");
}

void peer(const std::string& command, const std::string& path) { fsdp::testing::run_peer(fsdp::testing::kStatePeer, {command, path}); }

TEST_F(Extra, ComesBackAndGoesToPython) {
  for (const bool is_asynchronous : {false, true}) {
    const auto step = path(is_asynchronous ? "async" : "sync");
    auto expected = values();
    expected["empty"] = ExtraDict{};
    expected["deep"] = ExtraList{{ExtraList{{ExtraDict{}}}}};
    run_ranks(2, [&](int rank) {
      const ExtraState of_rank = {{"loader", ExtraDict{{{"position", std::int64_t{rank}}, {"order", at::arange(rank + 1)}}}}};
      torch::nn::Linear model(3, 2);
      fsdp::fully_shard(*model, {.mesh = line()});
      if (is_asynchronous) {
        fsdp::AsyncSaver saver(*model);
        saver.save(step, expected, {.rank_extra = of_rank});
        saver.wait();
      } else {
        fsdp::save(step, *model, expected, {.rank_extra = of_rank});
      }
      const auto loaded = fsdp::load(step, *model);
      expect_same(loaded.extra, expected);
      expect_same(loaded.rank_extra, of_rank);
    });
    const auto all = fsdp::read_rank_extra(step);
    ASSERT_EQ(all.size(), 2U);
    EXPECT_EQ(get_extra<std::int64_t>(all[1], "loader.position"), 1);
    peer("check_extra", step);
  }
}

TEST_F(Extra, ComesFromPython) {
  peer("extra", path("python"));
  run_ranks(2, [&] {
    torch::nn::Linear model(2, 3);
    fsdp::fully_shard(*model, {.mesh = line()});
    expect_same(fsdp::load(path("python"), *model).extra, values());
    const auto without = fsdp::load(path("python"), *model, {.ignore = [](const std::string& name) { return name == "extra.seen.0"; }});
    const auto& seen = without.get<ExtraList>("seen").items;
    ASSERT_EQ(seen.size(), 3U);
    EXPECT_TRUE(std::holds_alternative<ExtraNone>(seen[0]));
    EXPECT_EQ(get_extra<std::string>(std::get<ExtraDict>(seen[2]).items, "file"), "a.txt");
  });
}

// Python could read nothing of such a checkpoint, and a program could not tell which value it gets.
TEST_F(Extra, NamesThatPythonCannotReadOrThatCollideAreRefused) {
  struct Named : torch::nn::Module {
    explicit Named(const std::string& name) { register_module(name, torch::nn::Linear(2, 2)); }
  };
  run_ranks(2, [&](int rank) {
    const auto model = std::make_shared<Named>("good");
    fsdp::fully_shard(*model, {.mesh = line()});
    const auto refused = [&](const std::string& text, const ExtraState& extra) {
      const auto message = message_of([&] { fsdp::save(path("a"), *model, extra); });
      EXPECT_TRUE(has(message, "nothing was saved:") && has(message, text)) << message;
    };
    refused("extra['a']['b'] and extra['a.b'] would both be saved by the name 'extra.a.b'; rename one of them",
            {{"a", ExtraDict{{{"b", 1.0}}}}, {"a.b", std::int64_t{1}}});
    refused("extra['a'][0] and extra['a.0'] would both be saved by the name 'extra.a.0'",
            {{"a", ExtraList{{at::ones(1)}}}, {"a.0", std::int64_t{1}}});
    refused("the name 'extra.\\xff' is not UTF-8", {{"\xff", true}});
    refused("'extra.a' has the text 'x\\xc3', which is not UTF-8", {{"a", ExtraList{{std::string("ok"), std::string("x\xc3")}}}});
    if (rank == 0) {
      EXPECT_FALSE(std::filesystem::exists(path("a")));
    }
    const auto bad = std::make_shared<Named>("w\xff");
    fsdp::fully_shard(*bad, {.mesh = line()});
    const auto unreadable = "the name 'model.w\\xff.weight' is not UTF-8, and Python could read nothing of the checkpoint; rename it";
    const auto message = message_of([&] { fsdp::save(path("a"), *bad); });
    EXPECT_TRUE(has(message, unreadable)) << message;
    fsdp::AsyncSaver saver(*bad);
    EXPECT_TRUE(has(message_of([&] { saver.save(path("a")); }), unreadable)) << "at once";
    EXPECT_TRUE(has(message_of([&] { fsdp::export_safetensors(path("b"), *bad); }), "is not UTF-8"));
    fsdp::save(path("a"), *model, {{"\xc3\xa4.\xf0\x9f\x99\x82", std::string("\xe2\x82\xac")}});
    EXPECT_EQ(fsdp::load(path("a"), *model).get<std::string>("\xc3\xa4.\xf0\x9f\x99\x82"), "\xe2\x82\xac");
  });
}

TEST_F(Extra, IsAskedForByName) {
  run_ranks(1, [&] {
    torch::nn::Linear model(2, 3);
    fsdp::fully_shard(*model, {.mesh = line()});
    auto saved = values();
    saved["a.b"] = 2.5;
    saved["a"] = ExtraDict{{{"c", std::int64_t{4}}}};
    fsdp::save(path("1"), *model, saved);
    const auto loaded = fsdp::load(path("1"), *model);
    EXPECT_EQ(loaded.get<std::int64_t>("step"), 7);
    EXPECT_EQ(loaded.get<double>("step"), 7.0);
    EXPECT_EQ(loaded.get<std::int64_t>("scheduler.last_epoch"), 3);
    EXPECT_TRUE(torch::equal(loaded.get<at::Tensor>("scheduler.warm.order"), at::arange(4)));
    EXPECT_EQ(loaded.get<double>("a.b"), 2.5);
    EXPECT_EQ(loaded.get<std::int64_t>("a.c"), 4);
    (void)loaded.get<ExtraNone>("best");
    EXPECT_EQ(message_of([&] { (void)loaded.get<std::int64_t>("steps"); }),
              "there is no extra state 'steps'; there is 'a.c', 'a.b', 'best', 'nothing', 'scheduler.base_lrs', 'scheduler.last_epoch', "
              "'scheduler.warm.on', 'scheduler.warm.order', 'seen', 'step', 'tensors'");
    EXPECT_EQ(message_of([&] { (void)loaded.get<std::int64_t>("step.epoch"); }).substr(0, 40), "there is no extra state 'step.epoch'; th");
    EXPECT_EQ(message_of([&] { (void)loaded.get<double>("best"); }), "extra state 'best' is of type ExtraNone, not double");
    EXPECT_EQ(message_of([&] { (void)loaded.get<std::int64_t>("a.b"); }), "extra state 'a.b' is of type double, not std::int64_t");
    EXPECT_EQ(message_of([&] { (void)get_extra<bool>(loaded.rank_extra, "step"); }), "there is no extra state 'step', and none at all");
  });
}

// Metadata that were made up must not take memory for values that are not there.
TEST_F(Extra, ListsTakeNoMoreThanThereIs) {
  run_ranks(1, [&] {
    torch::nn::Linear model(2, 3);
    fsdp::fully_shard(*model, {.mesh = line()});
    fsdp::save(path("1"), *model, {{"list", ExtraList{{ExtraDict{{{"a", true}}}, std::int64_t{1}}}}});
    fsdp::testing::edit_metadata(path("1"), [](fsdp::ckpt::DcpMetadata& metadata) {
      for (auto& [name, where] : metadata.paths) {
        if (name == "extra.list.1") where.back() = std::int64_t{1'000'000};
      }
    });
    EXPECT_TRUE(has(message_of([&] { fsdp::load(path("1"), *model); }), "extra state 'list' is a list with more places than"));
  });
}

}  // namespace extra_test
