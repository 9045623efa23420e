#include "report/timeline_page.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "report/synthetic_ranks.h"
#include "report/timeline.h"
#include "report/trace_json.h"

namespace timeline_page_test {

using fsdp::report::RankEvents;
using fsdp::report::timeline_of;
using fsdp::report::timeline_page;
using fsdp::report::trace_json;
using fsdp::testing::SyntheticRank;
using Json = nlohmann::json;

/// Steps of a model of so many units, each gathered twice and reduced once, as every rank does it.
std::vector<RankEvents> ranks_of(int ranks, int steps, int units) {
  std::vector<RankEvents> all;
  for (int number = 0; number < ranks; ++number) {
    SyntheticRank rank(number, ranks);
    std::int64_t time = 1'000'000'000'000 + 1234 * number;
    std::uint64_t call = 0;
    for (int step = 1; step <= steps; ++step) {
      rank.step(time += 1'234'567);
      rank.hold_all(time + 1, {123'456'789, 98'765'432, 0, 0, 5'432'198, 246'913'578});
      for (const bool in_backward : {false, true}) {
        if (in_backward) rank.backward_began(time += 1000);
        for (int i = 0; i < units; ++i) {
          const auto unit = "model.layers." + std::to_string(in_backward ? units - 1 - i : i);
          rank.enter(time += 2'345'678, unit, in_backward);
          rank.hold(time + 1, 2, 123'456'789 + 1000 * i);
          if (in_backward) rank.hold(time + 2, 3, 234'567'891 - 1000 * i);
          const auto begin = time;
          rank.collective(
              {.posted = begin - 1'345'678, .wait_began = begin + 5432, .arrived = begin + 1'198'765, .wait_ended = begin + 1'234'567},
              ++call, unit, "all-gather");
          time += 1'234'567;
          if (!in_backward) continue;
          rank.collective(
              {.posted = time + 100, .wait_began = time + 3'456'789, .arrived = time + 4'456'789, .wait_ended = time + 4'567'890}, ++call,
              unit, "reduce-scatter");
        }
        rank.peak(time += 100, 1'234'567'890 + step, "model.layers.0");
      }
      rank.backward_ended(time += 5'000'000, static_cast<std::uint64_t>(step));
      rank.hold(time + 1, 2, 0);
    }
    all.push_back(rank.events());
  }
  return all;
}

std::string between(const std::string& text, const std::string& begin, const std::string& end) {
  const auto from = text.find(begin);
  if (from == std::string::npos) return {};
  const auto at = from + begin.size();
  return text.substr(at, text.find(end, at) - at);
}

Json data_of(const std::string& page) { return Json::parse(between(page, R"(<script type="application/json" id="data">)", "</script>")); }

TEST(TimelinePage, ThreeStepsOfEightRanksAreBelowTwoMegabytes) {
  const auto page = timeline_page(timeline_of(ranks_of(8, 3, 100)), "a run");
  EXPECT_LT(page.size(), 2'000'000U);
  EXPECT_GT(page.size(), 200'000U) << "the data are in it";
}

TEST(TimelinePage, LoadsNothing) {
  const auto page = timeline_page(timeline_of(ranks_of(2, 1, 3)), "a run");
  for (const char* what : {"http:", "https:", "//cdn", "@import", "src=", "url(", "fetch(", "XMLHttpRequest", "import("}) {
    EXPECT_EQ(page.find(what), std::string::npos) << what;
  }
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos) << "and it says so to the browser";
  EXPECT_EQ(page.find("{{"), std::string::npos) << "all parts are in their places";
}

TEST(TimelinePage, NamesDoNoHarm) {
  const std::string evil = "</script><script>alert(1)</script><!--\"\\\n\xff";
  SyntheticRank rank(0, 2);
  rank.step(0).enter(10, evil);
  rank.collective({.posted = 20, .wait_began = 25, .arrived = 28, .wait_ended = 30}, 1, evil, evil);
  const auto timeline = timeline_of({rank.events()});
  const auto page = timeline_page(timeline, evil);
  EXPECT_EQ(page.find("alert(1)</script>"), std::string::npos);
  EXPECT_EQ(page.find("<script>alert"), std::string::npos);
  EXPECT_EQ(page.find("<!--"), std::string::npos);
  const std::string readable = "</script><script>alert(1)</script><!--\"\\\n\xef\xbf\xbd";  // what is no UTF-8 is replaced
  const auto data = data_of(page);
  EXPECT_EQ(data.at("title"), readable);
  EXPECT_EQ(data.at("names")[1], readable);
  std::set<std::string> names;
  const auto trace = Json::parse(trace_json(timeline));
  for (const auto& event : trace.at("traceEvents")) names.insert(event.at("name").get<std::string>());
  EXPECT_TRUE(names.contains(readable + " (" + readable + ")")) << Json(names).dump();
}

TEST(TimelinePage, DataAreListsOfWholeEntries) {
  auto ranks = ranks_of(2, 2, 4);
  const auto timeline = timeline_of(ranks);
  const auto data = data_of(timeline_page(timeline, "a run"));
  EXPECT_EQ(data.at("version"), 2);
  EXPECT_TRUE(data.at("plan").is_null());
  EXPECT_TRUE(data.at("why").is_null());
  auto hanging = timeline;
  hanging.why = {.cause = fsdp::report::Cause::kNotArrived, .rank = 1, .text = "Rank 1 </script>"};
  EXPECT_EQ(data_of(timeline_page(hanging, "a run")).at("why"), Json({{"rank", 1}, {"text", "Rank 1 </script>"}}));
  EXPECT_EQ(data.at("kinds"), Json(fsdp::events::kMemoryKinds));
  EXPECT_EQ(data.at("length"), timeline.ended - timeline.began);
  ASSERT_EQ(data.at("ranks").size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    const auto& rank = data.at("ranks")[i];
    const auto& from = timeline.ranks[i];
    EXPECT_EQ(rank.at("steps").size(), 4 * from.steps.size());
    EXPECT_EQ(rank.at("compute").size(), 4 * from.compute.size());
    EXPECT_EQ(rank.at("memory").size(), 7 * from.memory.size());
    fsdp::report::BytesByKind held{};
    for (std::size_t at = 0; at < from.memory.size(); ++at) {
      for (std::size_t kind = 0; kind < held.size(); ++kind) held[kind] += rank.at("memory")[7 * at + 1 + kind].get<std::int64_t>();
      EXPECT_EQ(held, from.memory[at].held) << at;
    }
    EXPECT_EQ(rank.at("peaks").size(), 3 * from.peaks.size());
    EXPECT_EQ(rank.at("collectives").size(), (12 + 7) * from.collectives.size()) << "somebody waits for each of them";
    std::int64_t time = 0;
    for (std::size_t at = 0; at < from.collectives.size(); ++at) {
      time += rank.at("collectives")[19 * at].get<std::int64_t>();
      EXPECT_EQ(time, from.collectives[at].times.began - timeline.began);
    }
  }
}

TEST(TraceJson, IsWhatPerfettoReads) {
  const auto timeline = timeline_of(ranks_of(2, 2, 4));
  const auto trace = Json::parse(trace_json(timeline));
  std::set<std::string> threads;
  std::size_t waits = 0;
  for (const auto& event : trace.at("traceEvents")) {
    const auto ph = event.at("ph").get<std::string>();
    EXPECT_TRUE(event.at("name").is_string());
    EXPECT_TRUE(event.at("pid") == 0 || event.at("pid") == 1) << "the rank";
    EXPECT_TRUE(event.at("tid").is_number_unsigned());
    if (ph == "M") {
      if (event.at("name") == "thread_name") threads.insert(event.at("args").at("name").get<std::string>());
      continue;
    }
    EXPECT_GE(event.at("ts").get<double>(), 0.0);
    if (ph == "X") {
      EXPECT_GE(event.at("dur").get<double>(), 0.0);
      EXPECT_LE(event.at("ts").get<double>() + event.at("dur").get<double>(),
                static_cast<double>(timeline.ended - timeline.began) / 1e3 + 1e-3);
      if (event.at("cat") != "wait") continue;
      ++waits;
      std::int64_t sum = 0;
      for (const auto& [reason, ns] : event.at("args").at("reasons_ns").items()) sum += ns.get<std::int64_t>();
      EXPECT_NEAR(static_cast<double>(sum) / 1e3, event.at("dur").get<double>(), 1e-3);
    } else if (ph == "C") {
      for (const auto kind : fsdp::events::kMemoryKinds) EXPECT_TRUE(event.at("args").at(std::string(kind)).is_number());
    } else {
      EXPECT_EQ(ph, "i");
    }
  }
  EXPECT_EQ(threads, (std::set<std::string>{"compute", "exposed waits", "gather", "reduce", "reduce 2"}));
  std::size_t expected = 0;
  for (const auto& rank : timeline.ranks) expected += rank.collectives.size();
  EXPECT_EQ(waits, expected);
  EXPECT_NE(trace_json(timeline).find("\"FSDP::all_gather (model.layers.3)\""), std::string::npos) << "as torch.profiler shows it";
}

}  // namespace timeline_page_test
