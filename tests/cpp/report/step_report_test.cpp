#include "fsdp/step_report.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <regex>
#include <sstream>
#include <string>
#include <thread>

#include "events/event_ring.h"
#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/multi_rank.h"
#include "support/other_locale.h"
#include "support/stack.h"

namespace step_report_test {

using fsdp::StepReport;
using fsdp::WaitReason;
using fsdp::testing::line;
using fsdp::testing::make_stack;
using fsdp::testing::plane;
using fsdp::testing::run_ranks;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

constexpr int kSleepy = 1;
constexpr auto kSleep = std::chrono::milliseconds(300);
constexpr double kMostOfIt = 200;  // ms

double of(const std::array<double, fsdp::kWaitReasons>& reasons, WaitReason reason) { return reasons[static_cast<std::size_t>(reason)]; }

/// A stack that trains, in which one rank can be made to sleep at one place of one step.
class Training {
 public:
  explicit Training(const fsdp::DeviceMesh& mesh, int sleepy = kSleepy)
      : rank_(static_cast<int>(mesh.rank())), sleepy_(sleepy), model_(make_stack()) {
    fsdp::fully_shard(*model_, {.mesh = mesh, .units = stack_units()});
    optimizer_.emplace(*model_);
    model_->observer = [this](const std::string& event) {
      if (rank_ == sleepy_ && event == sleeps_at_) std::this_thread::sleep_for(kSleep);
    };
  }

  /// `place`: what the stack's observer is told, or "between".
  void step(const std::string& place = {}) {
    sleeps_at_ = place;
    stack_loss(model_, step_++, rank_).backward();
    optimizer_->step();
    optimizer_->zero_grad();
    if (rank_ == sleepy_ && place == "between") std::this_thread::sleep_for(kSleep);
  }

  fsdp::testing::Stack& model() { return model_; }

 private:
  const int rank_;
  const int sleepy_;
  fsdp::testing::Stack model_;
  std::optional<fsdp::AdamW> optimizer_;
  std::string sleeps_at_;
  std::int64_t step_ = 0;
};

// Ranks send each other texts, and programs read what reports say.
TEST(StepReport, IsTheSameUnderAnotherLocale) {
  run_ranks(2, [] {
    const fsdp::testing::OtherLocale other;
    Training training(line());
    for (int step = 0; step < 3; ++step) training.step();
    const auto report = fsdp::step_report(*training.model(), 2);
    std::ostringstream text;
    text << report << fsdp::to_string(fsdp::handle(*training.model()).units());
    EXPECT_TRUE(std::regex_search(text.str(), std::regex("ms: forward [0-9]+[.][0-9]"))) << text.str();
    EXPECT_FALSE(std::regex_search(text.str(), std::regex("[0-9],[0-9]"))) << text.str();
  });
}

/// A busy machine may make another rank late, too, so a place has three chances.
/// `activity` and `unit` must be in what the late rank was doing.
void expect_named(Training& training, int rank, const std::string& place, const std::string& activity, const std::string& unit = {}) {
  std::string seen;
  for (int chance = 0; chance < 3; ++chance) {
    training.step(place);
    if (place == "between") training.step();
    const auto report = fsdp::step_report(*training.model(), place == "between" ? 2 : 1);
    const auto steps = static_cast<double>(report.steps);
    const auto& longest = report.waits.front();
    std::ostringstream text;
    text << report;
    seen = text.str();
    const bool told = rank == kSleepy ? of(report.reasons, WaitReason::kLateRank) * steps < kMostOfIt
                                      : longest.late_rank == kSleepy && longest.late_rank_was.starts_with(activity) &&
                                            longest.late_rank_was.find(unit) != std::string::npos &&
                                            of(longest.reasons, WaitReason::kLateRank) * steps > kMostOfIt;
    const auto& slowest = report.slowest_ranks.front();
    const bool slowest_told = slowest.rank == kSleepy && slowest.compute_ms * steps > kMostOfIt;
    // All ranks decide alike.
    if (fsdp::testing::line().all(told && slowest_told)) return;
  }
  ADD_FAILURE() << place << ": expected rank " << kSleepy << " " << activity << " " << unit << ", got\n" << seen;
}

TEST(StepReport, NamesTheRankTheUnitAndTheReason) {
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [](int rank) {
      Training training(line());
      for (int i = 0; i < 2; ++i) training.step();
      expect_named(training, rank, "forward blocks.1", "in forward of 'blocks.0', before 'blocks.1'");
      expect_named(training, rank, "forward blocks.3", "in forward of 'blocks.2', before 'blocks.3'");
      expect_named(training, rank, "backward blocks.2", "in backward", "'blocks.2'");
      expect_named(training, rank, "backward blocks.0", "in backward", "'blocks.0'");
      expect_named(training, rank, "between", "between steps");
    });
  }
}

TEST(StepReport, ByMessagesAndOnTwoDimensions) {
  run_ranks(4, [](int rank) {
    for (const bool shared_memory : {false, true}) {
      const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", -1}}, {.shared_memory = shared_memory});
      Training training(mesh);
      for (int i = 0; i < 2; ++i) training.step();
      // Rank 2 waits for rank 0, which waits for the sleepy one.
      expect_named(training, rank, "forward blocks.2", "in forward of 'blocks.1', before 'blocks.2'");
    }
  });
}

TEST(StepReport, RanksOfAPartOfTheWorldHaveTheirGlobalNumbers) {
  run_ranks(4, [](int rank) {
    const auto mesh = plane();
    Training training(mesh["dp_shard"], 3);
    for (int i = 0; i < 2; ++i) training.step();
    training.step("forward blocks.2");
    const auto report = fsdp::step_report(*training.model());
    if (rank < 2) return;
    EXPECT_EQ(report.slowest_ranks.size(), 2U);
    EXPECT_EQ(report.slowest_ranks.front().rank, 3) << report;
    if (rank == 2) {
      EXPECT_EQ(report.waits.front().late_rank, 3) << report;
    }
  });
}

TEST(StepReport, TimesAndReasonsAddUp) {
  run_ranks(2, [](int rank) {
    Training training(line());
    for (int i = 0; i < 3; ++i) training.step();
    EXPECT_EQ(fsdp::step_report(*training.model(), 100).steps, 3);
    for (int i = 0; i < 4; ++i) training.step();
    const auto report = fsdp::step_report(*training.model(), 4);
    EXPECT_EQ(report.steps, 4);
    EXPECT_NEAR(report.times.forward_ms + report.times.backward_ms + report.times.between_ms, report.times.step_ms, 1e-6);
    EXPECT_NEAR(report.times.compute_ms + report.times.exposed_ms, report.times.step_ms, 1e-6);
    EXPECT_GE(report.times.slowest_step_ms, report.times.step_ms);
    EXPECT_NEAR(std::accumulate(report.reasons.begin(), report.reasons.end(), 0.0), report.times.exposed_ms, 1e-6);
    double waits = 0;
    for (const auto& exposed : report.waits) {
      waits += exposed.ms;
      EXPECT_NEAR(std::accumulate(exposed.reasons.begin(), exposed.reasons.end(), 0.0), exposed.ms, 1e-6) << exposed.unit;
    }
    EXPECT_NEAR(waits, report.times.exposed_ms, 1e-6);
    EXPECT_GE(report.overlap, 0);
    EXPECT_LE(report.overlap, 1);
    // The same, from the events alone: every wait between the beginning of the fourth-last step and the report.
    std::vector<fsdp::events::Event> events = fsdp::events::recorded();
    std::vector<std::int64_t> begins;
    for (const auto& event : events) {
      if (event.kind == fsdp::events::EventKind::kStepBegan) begins.push_back(event.time);
    }
    std::int64_t began = 0;
    std::int64_t sum = 0;
    const auto report_begins = std::find_if(events.begin(), events.end(), [&](const auto& event) {
      return event.time > begins.back() && fsdp::events::text_of(event.operation) == "step report";
    });
    for (auto event = events.begin(); event != report_begins; ++event) {
      if (event->time < begins[begins.size() - 4]) continue;
      if (event->kind == fsdp::events::EventKind::kWaitBegan) began = event->time;
      if (event->kind == fsdp::events::EventKind::kWaitEnded) sum += event->time - began;
    }
    EXPECT_NEAR(static_cast<double>(sum) / 1e6 / 4, report.times.exposed_ms, 1e-6);
  });
}

TEST(StepReport, ShallowPrefetchIsAReason) {
  run_ranks(2, [](int) {
    Training training(line());
    const auto sharded = fsdp::handle(*training.model());
    for (int i = 0; i < 3; ++i) training.step();
    // The order of the first step was not known in advance, and so was not that of its backward.
    EXPECT_EQ(of(fsdp::step_report(sharded, 2).reasons, WaitReason::kPrefetch), 0);
    fsdp::handle(*training.model()).set_prefetch_depth(0);
    for (int i = 0; i < 2; ++i) training.step();
    const auto report = fsdp::step_report(sharded, 2);
    EXPECT_GT(of(report.reasons, WaitReason::kPrefetch), 0);
    for (const auto& exposed : report.waits) {
      const bool first = exposed.unit == "(root)" || exposed.operation.find("all-gather") == std::string::npos;
      if (first) {
        EXPECT_EQ(of(exposed.reasons, WaitReason::kPrefetch), 0) << exposed.unit << " " << exposed.operation;
      }
    }
  });
}

TEST(StepReport, BytesAndPeakAreThoseOfTheStatistics) {
  for (const bool shared_memory : {true, false}) {
    run_ranks(2, [&](int) {
      Training training(fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = shared_memory}));
      auto sharded = fsdp::handle(*training.model());
      for (int i = 0; i < 2; ++i) training.step();
      sharded.reset_peak_memory_stats();
      const auto before = sharded.wire_stats();
      for (int i = 0; i < 2; ++i) training.step();
      const auto after = sharded.wire_stats();
      const auto memory = sharded.memory_stats();
      const auto report = fsdp::step_report(sharded, 2);
      const auto sent = [](const fsdp::WireStats& stats) {
        return stats.all_gather_bytes + stats.reduce_scatter_bytes + stats.scatter_bytes + stats.control_bytes;
      };
      EXPECT_EQ(2 * (report.sent_bytes + report.shared_memory_bytes), sent(after) - sent(before));
      EXPECT_EQ(2 * report.shared_memory_bytes, after.shared_memory_bytes - before.shared_memory_bytes);
      EXPECT_EQ(report.peak_bytes, memory.total.peak);
      EXPECT_NE(report.peak_unit, "");
    });
  }
}

TEST(StepReport, AccumulationIsOneStep) {
  run_ranks(2, [](int rank) {
    Training training(line());
    training.step();
    {
      const fsdp::NoSync no_sync(*training.model());
      for (int i = 0; i < 2; ++i) stack_loss(training.model(), i, rank).backward();
    }
    training.step();
    EXPECT_EQ(fsdp::step_report(*training.model(), 100).steps, 2);
  });
}

TEST(StepReport, SaysSoIfThereIsNothingToReport) {
  run_ranks(2, [](int) {
    Training training(line());
    const auto none = fsdp::step_report(*training.model(), 3);
    EXPECT_EQ(none.steps, 0);
    EXPECT_EQ(to_line(none), "no step has ended");
    EXPECT_THROW(fsdp::step_report(*training.model(), 0), fsdp::Error);
    training.step();
    EXPECT_EQ(fsdp::step_report(*training.model(), 3).steps, 1);
    const torch::nn::Linear other(1, 1);
    EXPECT_THROW(fsdp::step_report(*other), fsdp::Error);
  });
}

}  // namespace step_report_test
