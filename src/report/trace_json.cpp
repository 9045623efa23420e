#include "report/trace_json.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

namespace fsdp::report {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr double kNsPerUs = 1e3;
constexpr std::size_t kLanes = 4;
constexpr std::uint64_t kTracks = 100;  // of a lane at most, in the numbers of threads
constexpr int kCompute = 1;
constexpr int kWaits = 2;
constexpr std::array<const char*, kLanes> kLaneNames = {"gather", "reduce", "outer", "host"};

std::uint64_t thread_of(Lane lane, std::uint32_t track) {
  return (static_cast<std::uint64_t>(lane) + 1) * kTracks + std::min<std::uint64_t>(track, kTracks - 1);
}

std::string of_unit(const std::string& unit) { return unit.empty() ? std::string() : " (" + unit + ")"; }

/// Writes events one after the other: a tree of all of them would take ten times the memory.
class Trace {
 public:
  explicit Trace(const Timeline& timeline) : timeline_(timeline) {}

  std::string write() {
    text_ = "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"format\":\"libfsdp timeline 2\"},\"traceEvents\":[";
    for (const auto& rank : timeline_.ranks) write_rank(rank);
    text_ += "\n]}\n";
    return std::move(text_);
  }

 private:
  const std::string& name(std::uint32_t name) const { return timeline_.names[name]; }
  double us(std::int64_t time) const { return static_cast<double>(time - timeline_.began) / kNsPerUs; }

  void add(const OrderedJson& event) {
    text_ += text_.ends_with('[') ? "\n" : ",\n";
    text_ += event.dump(-1, ' ', true, OrderedJson::error_handler_t::replace);
  }

  void describe(std::int64_t rank, std::uint64_t thread, const std::string& what) {
    add({{"ph", "M"}, {"pid", rank}, {"tid", thread}, {"name", "thread_name"}, {"args", {{"name", what}}}});
    add({{"ph", "M"}, {"pid", rank}, {"tid", thread}, {"name", "thread_sort_index"}, {"args", {{"sort_index", thread}}}});
  }

  void write_rank(const RankTimeline& rank) {
    const auto pid = rank.writer.rank;
    const std::string host = rank.writer.host.data();
    add({{"ph", "M"},
         {"pid", pid},
         {"tid", 0},
         {"name", "process_name"},
         {"args", {{"name", "rank " + std::to_string(pid) + (host.empty() ? "" : " on " + host)}}}});
    add({{"ph", "M"}, {"pid", pid}, {"tid", 0}, {"name", "process_sort_index"}, {"args", {{"sort_index", pid}}}});
    describe(pid, kCompute, "compute");
    describe(pid, kWaits, "exposed waits");
    std::set<std::pair<Lane, std::uint32_t>> lanes;
    for (const auto& span : rank.collectives) lanes.emplace(span.lane, span.track);
    for (const auto& [lane, track] : lanes) {
      const std::string what = kLaneNames[static_cast<std::size_t>(lane)];
      describe(pid, thread_of(lane, track), track == 0 ? what : what + " " + std::to_string(track + 1));
    }
    for (const auto& step : rank.steps) {
      add({{"ph", "i"},
           {"pid", pid},
           {"tid", kCompute},
           {"ts", us(step.began)},
           {"name", "step " + std::to_string(step.number)},
           {"s", "p"}});
    }
    for (const auto& span : rank.compute) write(pid, span);
    for (const auto& span : rank.collectives) write(pid, span);
    for (const auto& moment : rank.memory) {
      OrderedJson held = OrderedJson::object();
      for (std::size_t kind = 0; kind < moment.held.size(); ++kind) held[std::string(events::kMemoryKinds[kind])] = moment.held[kind];
      add({{"ph", "C"}, {"pid", pid}, {"tid", 0}, {"ts", us(moment.time)}, {"name", "memory of the engine, bytes"}, {"args", held}});
    }
  }

  void write(std::int64_t pid, const ComputeSpan& span) {
    const char* const where = span.kind == Activity::Kind::kForward        ? "forward"
                              : span.kind == Activity::Kind::kBackward     ? "backward"
                              : span.kind == Activity::Kind::kBetweenSteps ? "between steps"
                                                                           : "compute";
    add({{"ph", "X"},
         {"pid", pid},
         {"tid", kCompute},
         {"ts", us(span.began)},
         {"dur", static_cast<double>(span.ended - span.began) / kNsPerUs},
         {"name", where + of_unit(name(span.unit))},
         {"cat", "compute"},
         {"args", {{"unit", name(span.unit)}}}});
  }

  void write(std::int64_t pid, const CollectiveSpan& span) {
    const auto& unit = name(span.unit);
    const auto shown = span.lane == Lane::kGather   ? "FSDP::all_gather"
                       : span.lane == Lane::kReduce ? "FSDP::post_backward_reduce"
                                                    : name(span.operation);
    OrderedJson args = {
        {"unit", unit}, {"collective", name(span.operation)}, {"row", name(span.row)}, {"number", span.number}, {"bytes", span.bytes}};
    if (span.state != CollectiveSpan::State::kDone) args["state"] = span.state == CollectiveSpan::State::kOpen ? "not ended" : "failed";
    add({{"ph", "X"},
         {"pid", pid},
         {"tid", thread_of(span.lane, span.track)},
         {"ts", us(span.times.began)},
         {"dur", static_cast<double>(span.times.ended - span.times.began) / kNsPerUs},
         {"name", shown + of_unit(unit)},
         {"cat", kLaneNames[static_cast<std::size_t>(span.lane)]},
         {"args", args}});
    if (span.times.wait_began == 0) return;
    const auto longest = static_cast<std::size_t>(std::max_element(span.reasons.begin(), span.reasons.end()) - span.reasons.begin());
    OrderedJson reasons = OrderedJson::object();
    for (std::size_t i = 0; i < kWaitReasons; ++i) reasons[to_string(static_cast<WaitReason>(i))] = span.reasons[i];
    args["in_backward"] = span.in_backward;
    args["reasons_ns"] = reasons;
    if (span.late_rank >= 0) {
      args["late_rank"] = span.late_rank;
      args["late_rank_was"] = name(span.late_rank_was);
    }
    const auto why = static_cast<WaitReason>(longest);
    add({{"ph", "X"},
         {"pid", pid},
         {"tid", kWaits},
         {"ts", us(span.times.wait_began)},
         {"dur", static_cast<double>(waited(span)) / kNsPerUs},
         {"name", std::string(to_string(why)) +
                      (why == WaitReason::kLateRank && span.late_rank >= 0 ? " " + std::to_string(span.late_rank) : "") + of_unit(unit)},
         {"cat", "wait"},
         {"args", args}});
  }

  const Timeline& timeline_;
  std::string text_;
};

}  // namespace

std::string trace_json(const Timeline& timeline) { return Trace(timeline).write(); }

}  // namespace fsdp::report
