#include "report/plan_comparison.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "events/event_ring.h"
#include "fsdp/fsdp.h"
#include "fsdp/plan.h"
#include "report/synthetic_ranks.h"
#include "report/timeline_files.h"
#include "report/timeline_page.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/stack.h"
#include "support/temporary_folder.h"

namespace plan_comparison_test {

using fsdp::events::EventKind;
using fsdp::events::kMemoryKinds;
using fsdp::report::BytesByKind;
using fsdp::report::compare;
using fsdp::report::PlanComparison;
using fsdp::report::PlannedStep;
using fsdp::report::read_plan;
using fsdp::report::timeline_of;
using fsdp::testing::make_stack;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;
using fsdp::testing::SyntheticRank;
using fsdp::testing::TemporaryFolder;

constexpr int kSteps = 7;  // The sixth is as the plan's step, and another one follows.

const std::vector<const fsdp::MemoryUse*> uses_of(const fsdp::MemoryStats& stats) {
  return {&stats.main_parameters,     &stats.main_gradients, &stats.gathered_parameters,
          &stats.unreduced_gradients, &stats.communication,  &stats.optimizer_state};
}

std::string plan_of(int ranks) {
  auto model = make_stack();
  return fsdp::plan(*model, {.mesh = fsdp::planned_device_mesh("cpu", {{"dp_shard", ranks}}), .units = stack_units()}).json();
}

TEST(PlanComparison, ARunIsAsItWasPlanned) {
  for (const int ranks : {2, 4}) {
    const TemporaryFolder folder;
    run_ranks(ranks, [&](int rank) {
      const auto mesh = fsdp::testing::line();
      fsdp::keep_events(folder.path(), mesh);
      auto model = make_stack();
      auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
      fsdp::AdamW optimizer(*model);
      for (int step = 0; step < kSteps; ++step) {
        sharded.reset_peak_memory_stats();
        stack_loss(model, step, rank).backward();
        if (step + 1 == kSteps) break;
        optimizer.step();
        optimizer.zero_grad();
      }
      // What events say of the last step is what the engine has counted.
      const auto stats = sharded.memory_stats();
      BytesByKind held{};
      BytesByKind peaks{};
      for (const auto& event : fsdp::events::recorded()) {
        if (event.kind == EventKind::kStepBegan) peaks = {};
        if (event.kind == EventKind::kMemoryHeld) held.at(event.number) = event.bytes;
        if (event.kind == EventKind::kKindPeaked) peaks.at(event.number) = event.bytes;
      }
      for (std::size_t kind = 0; kind < kMemoryKinds.size(); ++kind) {
        EXPECT_EQ(peaks[kind], uses_of(stats)[kind]->peak) << kMemoryKinds[kind];
        EXPECT_EQ(held[kind], uses_of(stats)[kind]->live) << kMemoryKinds[kind] << ": nothing has changed since";
      }
      mesh.barrier();
    });
    std::ofstream(folder.path() / "plan.json") << plan_of(ranks);
    std::vector<std::string> unreadable;
    const auto timeline = fsdp::report::read_timeline(folder.path(), {}, unreadable);
    const auto comparison = compare(read_plan(folder.path() / "plan.json"), timeline);
    ASSERT_EQ(comparison.values.size(), kMemoryKinds.size() + 4);
    for (const auto& value : comparison.values) {
      if (value.is_time) {
        EXPECT_EQ(value.planned, -1) << "the plan has no rates";
        EXPECT_GT(value.measured, 0);
      } else if (value.rank == 0) {  // which the plan is of; others may have more
        EXPECT_EQ(value.planned, value.measured) << value.name;
      } else {
        EXPECT_LE(value.planned, value.measured) << value.name;
      }
    }
    EXPECT_GT(comparison.values[2].measured, 0) << "units were gathered";
    EXPECT_EQ(comparison.planned_peak, comparison.values[kMemoryKinds.size()].planned);
  }
}

/// A rank of three steps, in which it sends and needs a little more each time.
fsdp::report::RankEvents rank_of(std::int64_t number, std::int64_t more) {
  SyntheticRank rank(number, 2);
  const auto step = [&](std::int64_t begin, std::uint64_t count) {
    const auto bytes = 100 * static_cast<std::int64_t>(count) + more;
    rank.step(begin, 1000 * static_cast<std::int64_t>(count * count), 100 * count).enter(begin + 1, "a").peak(begin + 2, bytes, "a");
    rank.backward_ended(begin + 5, count).peak_of_kind(begin + 6, 2, bytes - 10);
  };
  step(1'000'000, 1);
  step(3'000'000, 2);
  step(6'000'000, 3);
  step(16'000'000, 4);
  return rank.events();
}

TEST(PlanComparison, MeasuredIsTheRankThatHasMost) {
  const PlannedStep plan{.ranks = 2, .peak = 350, .peaks = {0, 0, 300}, .sent = 6900, .read_by_peers = 100, .ms = 2.5};
  const auto values = compare(plan, timeline_of({rank_of(0, 0), rank_of(1, 7)})).values;
  const auto find = [&](const std::string& name) {
    return *std::find_if(values.begin(), values.end(), [&](const auto& value) { return value.name == name; });
  };
  EXPECT_EQ(find("gathered parameters").planned, 300);
  EXPECT_EQ(find("gathered parameters").measured, 297) << "of the last step behind which another one began";
  EXPECT_EQ(find("gathered parameters").rank, 1);
  EXPECT_EQ(find("all kinds together").planned, 350);
  EXPECT_EQ(find("all kinds together").measured, 307);
  EXPECT_EQ(find("sent as messages").planned, 6800);
  EXPECT_EQ(find("sent as messages").measured, 6900);
  EXPECT_EQ(find("read by peers of its host").measured, 100);
  EXPECT_EQ(find("time of a step").planned, 2.5);
  EXPECT_EQ(find("time of a step").measured, 3) << "of the three, the one in the middle";
}

TEST(PlanComparison, WhatIsNotMeasuredIsNotKnown) {
  SyntheticRank rank(0, 2);
  rank.step(0).enter(1, "a");
  for (const auto& value : compare({.ranks = 2}, timeline_of({rank.events()})).values) {
    EXPECT_EQ(value.measured, -1) << value.name;
    EXPECT_EQ(value.rank, -1);
  }
}

TEST(PlanComparison, ThePageHasIt) {
  const PlannedStep plan{.ranks = 2, .peak = 350, .peaks = {0, 0, 300}, .sent = 6900, .read_by_peers = 100, .ms = 2.5};
  const auto timeline = timeline_of({rank_of(0, 0), rank_of(1, 7)});
  const auto page = fsdp::report::timeline_page(timeline, "a run", compare(plan, timeline));
  const std::string begin = R"(<script type="application/json" id="data">)";
  const auto at = page.find(begin) + begin.size();
  const auto data = nlohmann::json::parse(page.substr(at, page.find("</script>", at) - at)).at("plan");
  EXPECT_EQ(data.at("peak"), 350);
  EXPECT_EQ(data.at("values").size(), kMemoryKinds.size() + 4);
  EXPECT_EQ(data.at("values")[2], nlohmann::json::parse(R"(["gathered parameters", false, 300, 297, 1])"));
  EXPECT_EQ(data.at("values").back(), nlohmann::json::parse(R"(["time of a step", true, 2.5, 3, 0])"));
}

TEST(PlanComparison, WhatIsNoPlanIsSaid) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "plan.json";
  const auto message = [&] { return message_of<fsdp::Error>([&] { read_plan(file); }); };
  EXPECT_TRUE(fsdp::testing::has(message(), "plan.json: it can't be read; `fsdp plan --json` prints a plan")) << message();
  for (const char* text : {"", "{", "[]", R"({"ranks": 2})", R"({"ranks": "two"})"}) {
    std::ofstream(file) << text;
    EXPECT_TRUE(fsdp::testing::has(message(), "plan.json: it is no plan")) << text << ": " << message();
  }
  SyntheticRank rank(0, 2);
  const auto timeline = timeline_of({rank.step(0).events()});
  const auto other = message_of<fsdp::Error>([&] { compare({.ranks = 8}, timeline); });
  EXPECT_TRUE(fsdp::testing::has(other, "the plan is for 8 ranks, and these events are of a run of 2")) << other;
}

}  // namespace plan_comparison_test
