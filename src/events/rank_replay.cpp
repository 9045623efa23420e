#include "events/rank_replay.h"

#include <algorithm>
#include <bitset>
#include <iterator>
#include <limits>
#include <utility>

namespace fsdp::events {
namespace {

constexpr std::string_view kGather = "all-gather";

bool is_move(const Event& event) {
  return event.kind == EventKind::kStepBegan || event.kind == EventKind::kEntered || event.kind == EventKind::kBackwardBegan ||
         event.kind == EventKind::kBackwardEnded;
}

/// Where the computation is after a move.
Activity position_after(const Event& move) {
  auto kind = Activity::Kind::kForward;
  if (move.kind == EventKind::kBackwardBegan || (move.kind == EventKind::kEntered && move.in_backward)) kind = Activity::Kind::kBackward;
  if (move.kind == EventKind::kBackwardEnded && move.number != 0) kind = Activity::Kind::kBetweenSteps;
  return {.kind = kind, .unit = move.unit};
}

/// One engine, event by event.
class EngineState {
 public:
  explicit EngineState(std::uint32_t source) : source_(source) {}

  std::uint32_t source() const { return source_; }
  const Activity& position() const { return position_; }
  /// How many units have been entered, and how many of them in this pass.
  std::int64_t entered() const { return entered_; }
  std::int64_t entered_in_pass() const { return entered_in_pass_; }

  void take(const Event& event) {
    if (is_move(event)) return move(event);
    auto* const step = did_.steps.empty() ? nullptr : &did_.steps.back();
    if (event.kind == EventKind::kMemoryPeaked) {
      did_.peaks.push_back({.time = event.time, .bytes = event.bytes, .unit = event.unit});
      if (step == nullptr || event.bytes <= step->peak) return;
      step->peak = event.bytes;
      step->peak_unit = event.unit;
    } else if (event.number < held_.size() && event.kind == EventKind::kMemoryHeld) {
      hold(event.number, event.bytes);
    } else if (event.number < held_.size() && event.kind == EventKind::kKindPeaked && step != nullptr) {
      step->peaks[event.number] = std::max(step->peaks[event.number], event.bytes);
    }
  }

  /// The rank did this for some time.
  void spend(std::int64_t ns, const Activity& activity) {
    for (auto& [row, longest] : since_call_) {
      if (ns > longest.first) longest = {ns, activity};
    }
  }
  /// Returns what the rank did for the longest time since its last call in the row. It makes the next one now.
  Activity take_longest(std::uint32_t row) { return std::exchange(since_call_[row], {}).second; }

  EngineReplay take_replay() { return std::move(did_); }

 private:
  void move(const Event& event) {
    if (event.kind != EventKind::kEntered || position_.kind == Activity::Kind::kBetweenSteps) entered_in_pass_ = 0;
    if (event.kind == EventKind::kEntered) {
      ++entered_;
      ++entered_in_pass_;
    }
    position_ = position_after(event);
    if (!did_.compute.empty()) did_.compute.back().ended = event.time;
    did_.compute.push_back({.began = event.time, .kind = position_.kind, .unit = position_.unit});
    if (event.kind == EventKind::kStepBegan) begin_step(event);
    if (event.kind != EventKind::kBackwardEnded || event.number == 0) return;
    ended_steps_ = static_cast<std::int64_t>(event.number);
    if (did_.steps.empty()) return;
    did_.steps.back().number = ended_steps_;
    did_.steps.back().is_whole = true;
  }

  void begin_step(const Event& event) {
    const auto read = static_cast<std::int64_t>(event.number);
    if (!did_.steps.empty()) {
      auto& before = did_.steps.back();
      before.ended = event.time;
      before.sent = event.bytes - before.sent_before;
      before.read_by_peers = read - before.read_before;
    }
    did_.steps.push_back({.number = ended_steps_ + 1, .began = event.time, .sent_before = event.bytes, .read_before = read});
  }

  /// What is held is noted behind the move after which it is.
  void hold(std::uint64_t kind, std::int64_t bytes) {
    held_[kind] = bytes;
    known_.set(kind);
    if (!known_.all()) return;
    const auto moved = did_.compute.empty() ? 0 : did_.compute.back().began;
    if (did_.memory.empty() || did_.memory.back().time != moved) did_.memory.push_back({.time = moved});
    did_.memory.back().held = held_;
  }

  std::uint32_t source_;
  EngineReplay did_;
  Activity position_;
  std::int64_t entered_ = 0;
  std::int64_t entered_in_pass_ = 0;
  std::int64_t ended_steps_ = 0;
  BytesByKind held_ = {};
  std::bitset<kMemoryKinds.size()> known_;                                 ///< The kinds of which it is known what is held.
  std::map<std::uint32_t, std::pair<std::int64_t, Activity>> since_call_;  ///< By row: the longest time, and what was done in it.
};

/// The engines of the events, the one that counts most first.
std::vector<EngineState> engines_of(const std::vector<Event>& events, std::uint32_t first) {
  std::map<std::uint32_t, std::int64_t> steps;
  for (const auto& event : events) {
    if (is_move(event)) steps[event.source] += event.kind == EventKind::kStepBegan ? 1 : 0;
  }
  if (first != 0) steps[first] = std::numeric_limits<std::int64_t>::max();
  if (steps.empty()) steps[0] = 0;
  std::vector<EngineState> engines;
  for (const auto& [source, count] : steps) engines.emplace_back(source);
  std::stable_sort(engines.begin(), engines.end(),
                   [&](const auto& a, const auto& b) { return steps.at(a.source()) > steps.at(b.source()); });
  return engines;
}

/// All engines and collectives of a rank, event by event.
class Replayer {
 public:
  Replayer(RankReplay& rank, const std::vector<Event>& events, const TextOf& text_of, std::uint32_t first)
      : rank_(rank), text_of_(text_of), engines_(engines_of(events, first)) {
    for (std::size_t i = engines_.size(); i-- > 0;) {
      for (const auto& event : events) {
        if (event.kind == EventKind::kEntered && event.source == engines_[i].source()) of_unit_[event.unit] = i;
      }
    }
    for (const auto& event : events) take(event);
    for (auto& engine : engines_) rank_.engines.push_back(engine.take_replay());
  }

 private:
  void take(const Event& event) {
    spend(event);
    rank_.last_event = event.time;
    if (is_move(event) || event.kind == EventKind::kPosted) rank_.last_move = event.time;
    if (is_move(event)) rank_.position = position_after(event);
    for (auto& engine : engines_) {
      if (event.source == engine.source()) engine.take(event);
    }
    take_collective(event);
    take_failure(event);
  }

  /// The time from the event before until this one.
  void spend(const Event& event) {
    const auto ns = event.time - rank_.last_event;
    for (auto& engine : engines_) {
      auto activity = engine.position();
      if (!rank_.open_waits.empty()) {
        const auto& awaited = rank_.open_waits.back();
        activity = {.kind = Activity::Kind::kWaiting, .unit = rank_.collectives.at(awaited).call.unit, .awaited = awaited};
      } else if (event.kind == EventKind::kEntered && event.source == engine.source()) {
        activity.next = event.unit;
      }
      engine.spend(ns, activity);
    }
  }

  void take_collective(const Event& event) {
    const CollectiveKey key{event.source, event.number};
    auto& all = rank_.collectives;
    switch (event.kind) {
      case EventKind::kPosted:
        post(event, all[key]);
        break;
      case EventKind::kWaitBegan:
        begin_wait(event, all[key]);
        rank_.open_waits.push_back(key);
        break;
      case EventKind::kArrived:
        all[key].arrived = event.time;
        break;
      case EventKind::kWaitEnded:
      case EventKind::kFailed:
        (event.kind == EventKind::kFailed ? all[key].failed : all[key].wait_ended) = event.time;
        std::erase(rank_.open_waits, key);
        break;
      case EventKind::kHeldStream:
        if (const auto found = all.find(key); found != all.end()) found->second.held_stream = event.bytes;
        break;
      default:
        break;
    }
  }

  void post(const Event& event, Collective& collective) {
    const auto& owner = engine_of(event.unit);
    collective.call = event;
    collective.posted = event.time;
    for (auto& engine : engines_) {
      const auto longest = engine.take_longest(event.source);
      if (&engine == &owner) collective.before = longest;
    }
    entered_at_post_[{event.source, event.number}] = owner.entered();
  }

  void begin_wait(const Event& event, Collective& collective) {
    if (collective.posted == 0) collective.call = event;
    const auto& engine = engine_of(collective.call.unit);
    collective.wait_began = event.time;
    collective.in_backward = engine.position().kind == Activity::Kind::kBackward;
    collective.posted_on_demand = collective.posted != 0 && text_of_(event.operation).find(kGather) != std::string_view::npos &&
                                  entered_at_post_.at({event.source, event.number}) == engine.entered() && engine.entered_in_pass() > 1;
  }

  const EngineState& engine_of(std::uint32_t unit) const {
    const auto found = of_unit_.find(unit);
    return engines_[found == of_unit_.end() ? 0 : found->second];
  }

  void take_failure(const Event& event) {
    if (event.kind == EventKind::kStepBegan) {
      rank_.first_failure.reset();  // It has gone on.
    } else if (event.kind == EventKind::kFailed) {
      fail({.time = event.time, .text = 0, .in = CollectiveKey{event.source, event.number}});
    } else if (event.kind == EventKind::kGivenUp) {
      fail({.time = event.time, .text = event.operation, .in = CollectiveKey{event.source, 0}});
    } else if (event.kind == EventKind::kEnded && !rank_.end) {
      rank_.end = static_cast<EndKind>(event.number);
      rank_.end_text = event.operation;
      if (rank_.end == EndKind::kException) fail({.time = event.time, .text = event.operation, .in = {}});
    }
  }

  /// The first failure is the one that counts. Its row and its text come in two events, in either order; a failure without a text has that
  /// of the exception that ends the program.
  void fail(const FirstFailure& next) {
    auto& first = rank_.first_failure;
    if (!first) {
      first = next;
      return;
    }
    const bool same_row = next.in && first->in && next.in->first == first->in->first;
    if (first->text == 0 && (!next.in || !first->in || same_row)) first->text = next.text;
    if (same_row && first->in->second == 0) first->in->second = next.in->second;
  }

  RankReplay& rank_;
  const TextOf& text_of_;
  std::vector<EngineState> engines_;
  std::map<std::uint32_t, std::size_t> of_unit_;  ///< The place of the engine that has the unit.
  std::map<CollectiveKey, std::int64_t> entered_at_post_;
};

}  // namespace

void EngineReplay::end_at(std::int64_t time) {
  if (!steps.empty()) steps.back().ended = time;
  if (!compute.empty()) compute.back().ended = time;
}

std::vector<StepSpan> EngineReplay::whole_steps() const {
  std::vector<StepSpan> whole;
  std::copy_if(steps.begin(), steps.end(), std::back_inserter(whole), [](const StepSpan& step) { return step.is_whole; });
  return whole;
}

std::int64_t EngineReplay::time_in(Activity::Kind kind, std::int64_t began, std::int64_t ended) const {
  std::int64_t sum = 0;
  for (const auto& span : compute) {
    if (span.kind == kind) sum += std::max<std::int64_t>(std::min(span.ended, ended) - std::max(span.began, began), 0);
  }
  return sum;
}

RankReplay::RankReplay(std::vector<Event> events, const TextOf& text_of, std::uint32_t engine) {
  // Threads take their places in the ring one after the other, but the time before that.
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.time < b.time; });
  Replayer(*this, events, text_of, engine);
}

std::uint64_t RankReplay::last_call(std::uint32_t row) const {
  std::uint64_t last = 0;
  for (auto entry = collectives.lower_bound({row, 0}); entry != collectives.end() && entry->first.first == row; ++entry) {
    if (entry->second.posted != 0) last = entry->first.second;
  }
  return last;
}

const Collective* RankReplay::awaited(std::uint32_t row) const {
  const auto last = std::find_if(open_waits.rbegin(), open_waits.rend(), [&](const auto& key) { return key.first == row; });
  return last == open_waits.rend() ? nullptr : &collectives.at(*last);
}

}  // namespace fsdp::events
