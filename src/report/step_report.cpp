#include "fsdp/step_report.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "comm/communicator.h"
#include "comm/mesh/ranks.h"
#include "engine/engine.h"
#include "engine/wire_stats.h"
#include "events/event_ring.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "report/clock_offset.h"
#include "report/waits.h"

namespace fsdp {
namespace report {
namespace {

constexpr comm::Label kReport = {.operation = "step report", .unit = {}};
constexpr std::size_t kSlowestRanks = 3;
constexpr double kNsPerMs = 1e6;

/// An activity as a number that means the same on all ranks of the model: its kind, and the positions of its units in the engine, from 1.
class ActivityCode {
 public:
  explicit ActivityCode(const engine::Engine& engine) {
    for (const auto& unit : engine.units()) names_.push_back(events::name_of(unit->name));
  }

  std::int64_t encode(const Activity& activity) const {
    return static_cast<std::int64_t>(activity.kind) << 48 | place_of(activity.unit) << 24 | place_of(activity.next);
  }

  std::string describe(std::int64_t code) const {
    const auto unit = name_at(code >> 24 & 0xffffff);
    const auto next = name_at(code & 0xffffff);
    return events::activity_text(static_cast<Activity::Kind>(code >> 48), unit, next);
  }

 private:
  std::int64_t place_of(std::uint32_t name) const {
    const auto found = std::find(names_.begin(), names_.end(), name);
    return name == 0 || found == names_.end() ? 0 : found - names_.begin() + 1;
  }
  std::string name_at(std::int64_t place) const {
    return place == 0 ? std::string() : std::string(events::text_of(names_[static_cast<std::size_t>(place - 1)]));
  }

  std::vector<std::uint32_t> names_;
};

/// The last call of another rank, with the rank that kept it from calling and what that one was doing: itself, or one for which it waited.
struct LatePost {
  std::int64_t posted = 0;
  std::int64_t cause = -1;
  std::int64_t activity = 0;
};

/// The calls of a row that a report is about.
class RowCalls {
 public:
  /// `numbers` are those that this rank has waited for. Collective over the row.
  RowCalls(comm::Communicator& row, std::vector<std::uint64_t> numbers) : row_(row), numbers_(std::move(numbers)) {
    // Ranks may have waited for different ones at the ends of the steps.
    const auto first = numbers_.empty() ? std::int64_t{-1} : static_cast<std::int64_t>(numbers_.front());
    const auto last = numbers_.empty() ? std::int64_t{-1} : static_cast<std::int64_t>(numbers_.back());
    const auto ranges = row_.exchange(at::tensor({first, last}, at::kLong), kReport);
    for (std::int64_t rank = 0; rank < ranges.size(0); ++rank) {
      const auto from = ranges[rank][0].item<std::int64_t>();
      if (from < 0) continue;
      begin_ = begin_ < 0 ? from : std::min(begin_, from);
      end_ = std::max(end_, ranges[rank][1].item<std::int64_t>() + 1);
    }
  }

  /// Asks the other ranks when they have made these calls, and what kept them. `own` is this rank's answer, of a collective. Collective
  /// over the row.
  void ask(const std::map<CollectiveKey, Collective>& all, const std::function<LatePost(const Collective&)>& own,
           std::map<CollectiveKey, LatePost>& late) const {
    if (begin_ < 0) return;
    constexpr std::int64_t kValues = 3;
    const auto mine = at::zeros({end_ - begin_, kValues}, at::kLong);
    auto* values = mine.mutable_data_ptr<std::int64_t>();
    for (auto number = begin_; number < end_; ++number, values += kValues) {
      const auto found = all.find({row_.events_source(), static_cast<std::uint64_t>(number)});
      if (found == all.end() || found->second.posted == 0) continue;
      const auto post = own(found->second);
      std::copy_n(std::array{post.posted, post.cause, post.activity}.begin(), kValues, values);
    }
    const auto theirs = row_.exchange(mine, kReport).contiguous();
    for (const auto number : numbers_) {
      auto& call = late[{row_.events_source(), number}];
      call = {};
      for (std::int64_t rank = 0; rank < row_.size(); ++rank) {
        const auto place = rank * (end_ - begin_) + static_cast<std::int64_t>(number) - begin_;
        const auto* of_call = theirs.const_data_ptr<std::int64_t>() + kValues * place;
        if (rank == row_.rank() || of_call[0] == 0 || of_call[0] <= call.posted) continue;
        call = {.posted = of_call[0], .cause = of_call[1], .activity = of_call[2]};
      }
    }
  }

 private:
  comm::Communicator& row_;
  const std::vector<std::uint64_t> numbers_;
  std::int64_t begin_ = -1;  ///< Of the numbers of all ranks.
  std::int64_t end_ = -1;
};

/// Waits of one kind, added up.
struct Sum {
  std::array<std::int64_t, kWaitReasons> reasons{};
  std::int64_t held_stream = -1;                                       // -1: not measured
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> late;  // by rank and activity
};
using WaitKind = std::tuple<std::string, std::string, bool>;  // unit, operation, in backward

std::int64_t total(const std::array<std::int64_t, kWaitReasons>& reasons) {
  std::int64_t sum = 0;
  for (const auto ns : reasons) sum += ns;
  return sum;
}

/// The report of one rank, apart from what it needs of all of them.
class Reporter {
 public:
  Reporter(engine::Engine& engine, std::vector<events::Event> events, std::int64_t now)
      : engine_(engine), code_(engine), replay_(std::move(events), events::text_of, engine.options().events_source) {
    did_.end_at(now);
    steps_ = did_.whole_steps();
  }

  StepReport make(std::int64_t count) {
    count_bytes();  // First: what follows sends, too.
    const comm::Ranks ranks(engine_.options().mesh);
    const auto have = ranks.exchange(at::full({1}, std::min(count, static_cast<std::int64_t>(steps_.size())), at::kLong), kReport);
    count = have.min().item<std::int64_t>();
    if (count == 0) return {};
    steps_.erase(steps_.begin(), steps_.end() - count);
    add_waits(clock_offset(ranks));
    describe_steps();
    describe_waits();
    compare_ranks(ranks);
    return std::move(report_);
  }

 private:
  bool within_steps(const Collective& collective) const {
    return collective.wait_began != 0 && collective.wait_ended != 0 && collective.wait_began >= steps_.front().began &&
           collective.wait_ended <= steps_.back().ended;
  }

  void add_waits(std::int64_t offset) {
    std::map<std::uint32_t, RowCalls> rows;  // by source
    for (auto* row : engine::communicators_of(engine_.units())) {
      if (row->events_source() == 0 || rows.contains(row->events_source())) continue;
      std::vector<std::uint64_t> numbers;
      for (const auto& [key, collective] : all_) {
        if (key.first == row->events_source() && within_steps(collective)) numbers.push_back(key.second);
      }
      rows.try_emplace(row->events_source(), *row, std::move(numbers));
    }
    std::map<CollectiveKey, LatePost> late;  // in the first rank's clock
    const auto own = [&](const Collective& collective) {
      LatePost post{
          .posted = collective.posted - offset, .cause = engine_.options().mesh.rank(), .activity = code_.encode(collective.before)};
      const auto kept = late.find(collective.before.awaited);
      if (collective.before.kind != Activity::Kind::kWaiting || kept == late.end() || kept->second.cause < 0) return post;
      if (!is_for_peer(all_.at(kept->first), kept->second.posted + offset)) return post;
      post.cause = kept->second.cause;
      post.activity = kept->second.activity;
      return post;
    };
    // Each round follows ranks that waited for others one row further.
    for (std::size_t round = 0; round < rows.size(); ++round) {
      for (const auto& [source, row] : rows) row.ask(all_, own, late);
    }
    for (auto& [key, call] : late) {
      if (call.cause >= 0) call.posted += offset;
      add_wait(all_.at(key), call);
    }
  }

  void add_wait(const Collective& collective, const LatePost& call) {
    const auto reasons = reasons_of(collective, call.posted, queued_bytes(collective, call.posted, all_));
    auto& sum = sums_[{std::string(events::text_of(collective.call.unit)), std::string(events::text_of(collective.call.operation)),
                       collective.in_backward}];
    for (std::size_t i = 0; i < kWaitReasons; ++i) sum.reasons[i] += reasons[i];
    if (collective.held_stream >= 0) sum.held_stream = std::max<std::int64_t>(sum.held_stream, 0) + collective.held_stream;
    const auto late = reasons[static_cast<std::size_t>(WaitReason::kLateRank)];
    if (late > 0) sum.late[{call.cause, call.activity}] += late;
    if (collective.posted != 0) under_way_ += collective.wait_ended - collective.posted;
  }

  double per_step(std::int64_t ns) const { return static_cast<double>(ns) / kNsPerMs / static_cast<double>(steps_.size()); }

  void describe_steps() {
    report_.steps = static_cast<std::int64_t>(steps_.size());
    const auto began = steps_.front().began;
    const auto ended = steps_.back().ended;
    for (const auto& step : steps_) {
      report_.times.slowest_step_ms = std::max(report_.times.slowest_step_ms, static_cast<double>(step.ended - step.began) / kNsPerMs);
      if (step.peak > report_.peak_bytes) {
        report_.peak_bytes = step.peak;
        report_.peak_unit = events::text_of(step.peak_unit);
      }
    }
    report_.times.step_ms = per_step(ended - began);
    report_.times.forward_ms = per_step(did_.time_in(Activity::Kind::kForward, began, ended));
    report_.times.backward_ms = per_step(did_.time_in(Activity::Kind::kBackward, began, ended));
    report_.times.between_ms = per_step(did_.time_in(Activity::Kind::kBetweenSteps, began, ended));
    const auto sent = sent_ - steps_.front().sent_before;
    const auto read = read_by_peers_ - steps_.front().read_before;
    report_.shared_memory_bytes = std::max<std::int64_t>(read, 0) / report_.steps;
    report_.sent_bytes = std::max<std::int64_t>(sent - read, 0) / report_.steps;
  }

  /// What this rank has sent until now.
  void count_bytes() {
    for (const auto* row : engine::communicators_of(engine_.units())) {
      const auto& stats = row->stats();
      sent_ += engine::bytes_of(stats);
      read_by_peers_ += stats.shared_memory_bytes;
    }
  }

  void describe_waits() {
    std::array<std::int64_t, kWaitReasons> reasons{};
    for (const auto& [kind, sum] : sums_) {
      ExposedWaits waits;
      std::tie(waits.unit, waits.operation, waits.in_backward) = kind;
      waits.ms = per_step(total(sum.reasons));
      if (sum.held_stream >= 0) {
        waits.device_ms = per_step(sum.held_stream);
        report_.times.device_exposed_ms = std::max(report_.times.device_exposed_ms, 0.0) + waits.device_ms;
      }
      for (std::size_t i = 0; i < kWaitReasons; ++i) {
        reasons[i] += sum.reasons[i];
        waits.reasons[i] = per_step(sum.reasons[i]);
      }
      const auto longest =
          std::max_element(sum.late.begin(), sum.late.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
      if (longest != sum.late.end()) {
        waits.late_rank = longest->first.first;
        waits.late_rank_was = code_.describe(longest->first.second);
      }
      report_.waits.push_back(std::move(waits));
    }
    std::stable_sort(report_.waits.begin(), report_.waits.end(), [](const auto& a, const auto& b) { return a.ms > b.ms; });
    for (std::size_t i = 0; i < kWaitReasons; ++i) report_.reasons[i] = per_step(reasons[i]);
    report_.times.exposed_ms = per_step(total(reasons));
    report_.times.compute_ms = report_.times.step_ms - report_.times.exposed_ms;
    if (under_way_ > 0) report_.overlap = 1 - static_cast<double>(total(reasons)) / static_cast<double>(under_way_);
  }

  void compare_ranks(const comm::Ranks& ranks) {
    const auto global_rank = static_cast<double>(engine_.options().mesh.rank());
    const auto all = ranks.exchange(at::tensor({report_.times.compute_ms, global_rank}, at::kDouble), kReport).contiguous();
    const auto* values = all.const_data_ptr<double>();
    for (std::int64_t i = 0; i < ranks.size(); ++i) {
      report_.slowest_ranks.push_back({.rank = static_cast<std::int64_t>(values[2 * i + 1]), .compute_ms = values[2 * i]});
    }
    std::stable_sort(report_.slowest_ranks.begin(), report_.slowest_ranks.end(),
                     [](const RankTime& a, const RankTime& b) { return a.compute_ms > b.compute_ms; });
    report_.median_compute_ms = report_.slowest_ranks[report_.slowest_ranks.size() / 2].compute_ms;
    if (report_.slowest_ranks.size() > kSlowestRanks) report_.slowest_ranks.resize(kSlowestRanks);
  }

  engine::Engine& engine_;
  const ActivityCode code_;
  events::RankReplay replay_;
  const std::map<CollectiveKey, Collective>& all_ = replay_.collectives;
  events::EngineReplay& did_ = replay_.engines.front();
  std::vector<events::StepSpan> steps_;
  std::map<WaitKind, Sum> sums_;
  std::int64_t under_way_ = 0;
  std::int64_t sent_ = 0;
  std::int64_t read_by_peers_ = 0;
  StepReport report_;
};

std::string ms(double value) { return with_decimals(value, value < 10 ? 2 : 1); }

std::string named(const std::string& unit, const std::string& operation, bool in_backward) {
  return operation + (unit.empty() ? std::string() : " of '" + unit + "'") + (in_backward ? " in backward" : "");
}

/// "late rank 20.1 (rank 3, in forward of 'blocks.2'), link 1.2"
std::string reasons_text(const std::array<double, kWaitReasons>& reasons, std::int64_t late_rank, const std::string& late_rank_was) {
  std::string text;
  for (std::size_t i = 0; i < kWaitReasons; ++i) {
    if (reasons[i] < 0.005) continue;
    text += (text.empty() ? "" : ", ") + std::string(to_string(static_cast<WaitReason>(i))) + " " + ms(reasons[i]);
    if (static_cast<WaitReason>(i) == WaitReason::kLateRank && late_rank >= 0)
      text += " (rank " + std::to_string(late_rank) + ", " + late_rank_was + ")";
  }
  return text;
}

}  // namespace
}  // namespace report

StepReport step_report(const FSDPModule& sharded, std::int64_t steps) {
  if (steps < 1) throw Error("step_report: steps must be positive, got " + std::to_string(steps));
  auto& engine = *sharded.engine();
  engine.main().refuse_export();
  const auto asked = report::now();
  StepReport report;
  engine.main().exclusively([&] {
    for (auto* row : engine::communicators_of(engine.units())) row->note_stream_times();
    report = report::Reporter(engine, events::recorded(), asked).make(steps);
  });
  events::measure_streams();
  return report;
}

StepReport step_report(const torch::nn::Module& module, std::int64_t steps) { return step_report(handle(module), steps); }

std::string to_line(const StepReport& report) {
  using report::ms;
  if (report.steps == 0) return "no step has ended";
  std::string text = "step " + ms(report.times.step_ms) + " ms: forward " + ms(report.times.forward_ms) + ", backward " +
                     ms(report.times.backward_ms) + ", between " + ms(report.times.between_ms) + "; waits " + ms(report.times.exposed_ms);
  const auto reasons = report::reasons_text(report.reasons, -1, {});
  if (!reasons.empty()) text += " (" + reasons + ")";
  if (report.times.device_exposed_ms >= 0) text += "; the device waited " + ms(report.times.device_exposed_ms);
  if (!report.waits.empty() && report.waits.front().ms >= 0.005) {
    const auto& longest = report.waits.front();
    text += "; longest: " + report::named(longest.unit, longest.operation, longest.in_backward) + " " + ms(longest.ms);
    if (longest.late_rank >= 0) text += " (rank " + std::to_string(longest.late_rank) + " was " + longest.late_rank_was + ")";
  }
  if (report.slowest_ranks.size() > 1) {
    const auto& slowest = report.slowest_ranks.front();
    text += "; slowest: rank " + std::to_string(slowest.rank) + ", " + ms(slowest.compute_ms) + " ms of computing (median " +
            ms(report.median_compute_ms) + ")";
  }
  return text;
}

std::ostream& operator<<(std::ostream& stream, const StepReport& report) {
  constexpr std::size_t kShown = 10;
  stream << to_line(report) << "\n";
  for (std::size_t i = 0; i < std::min(report.waits.size(), kShown); ++i) {
    const auto& waits = report.waits[i];
    if (waits.ms < 0.005) break;
    stream << "  " << report::ms(waits.ms) << " ms  " << report::named(waits.unit, waits.operation, waits.in_backward) << ": "
           << report::reasons_text(waits.reasons, waits.late_rank, waits.late_rank_was) << "\n";
  }
  return stream;
}

}  // namespace fsdp
