#include "report/timeline.h"

#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

#include "events/event_memory.h"
#include "fsdp/error.h"

namespace fsdp::report {

using events::Event;
using events::EventKind;

namespace {

/// NameTable of all ranks.
class NameTable {
 public:
  std::uint32_t add(const std::string& text) {
    const auto [place, is_new] = places_.try_emplace(text, static_cast<std::uint32_t>(texts_.size()));
    if (is_new) texts_.push_back(text);
    return place->second;
  }
  std::vector<std::string> take() { return std::move(texts_); }

 private:
  std::vector<std::string> texts_ = {""};
  std::map<std::string, std::uint32_t> places_ = {{"", 0}};
};

Lane lane_of(std::string_view operation) {
  if (operation.starts_with("all-gather")) return Lane::kGather;
  if (operation.starts_with("reduce-scatter")) return Lane::kReduce;
  return operation.starts_with("outer ") ? Lane::kOuter : Lane::kHost;
}

bool is_position(const Event& event) {
  return event.kind == EventKind::kStepBegan || event.kind == EventKind::kEntered || event.kind == EventKind::kBackwardBegan ||
         event.kind == EventKind::kBackwardEnded;
}

/// Where the computation is after such an event.
Activity::Kind kind_after(const Event& event) {
  if (event.kind == EventKind::kBackwardEnded) return event.number > 0 ? Activity::Kind::kBetweenSteps : Activity::Kind::kForward;
  return event.in_backward || event.kind == EventKind::kBackwardBegan ? Activity::Kind::kBackward : Activity::Kind::kForward;
}

/// The events of one rank, in the common clock.
struct RankInput {
  explicit RankInput(const RankEvents& events) : rank(&events), events(events.events) {}

  const RankEvents* rank;
  std::vector<Event> events;
  std::vector<std::uint32_t> engines;  ///< Sources of positions; the one with the most steps first.
  std::map<CollectiveKey, Collective> collectives;
  std::map<CollectiveKey, std::int64_t> failed;  ///< When.
  std::int64_t last = 0;                         ///< Its last moment: see draw_until_now().

  std::string_view text_of(std::uint32_t name) const { return name < rank->names.size() ? rank->names[name] : std::string_view(); }
  std::string name(std::uint32_t name) const { return std::string(text_of(name)); }
  std::string row_of(std::uint32_t source) const { return source < rank->sources.size() ? rank->sources[source] : std::string(); }
};

std::vector<std::uint32_t> engines_of(const std::vector<Event>& events) {
  std::map<std::uint32_t, int> steps;
  for (const auto& event : events) {
    if (is_position(event)) steps[event.source] += event.kind == EventKind::kStepBegan ? 1 : 0;
  }
  std::vector<std::uint32_t> engines;
  for (const auto& [source, count] : steps) engines.push_back(source);
  std::stable_sort(engines.begin(), engines.end(), [&](auto a, auto b) { return steps[a] > steps[b]; });
  if (engines.empty()) engines.push_back(0);
  return engines;
}

/// Each collective as the engine sees it that has its unit.
std::map<CollectiveKey, Collective> collectives_of_all(const RankInput& input) {
  const auto text_of = [&](std::uint32_t name) { return input.text_of(name); };
  auto all = collectives_of(input.events, input.engines.front(), text_of);
  for (std::size_t i = 1; i < input.engines.size(); ++i) {
    std::set<std::uint32_t> units;
    for (const auto& event : input.events) {
      if (event.source == input.engines[i] && event.kind == EventKind::kEntered) units.insert(event.unit);
    }
    for (const auto& event : input.events) {
      if (event.source == input.engines.front() && event.kind == EventKind::kEntered) units.erase(event.unit);
    }
    for (auto& [key, collective] : collectives_of(input.events, input.engines[i], text_of)) {
      if (units.contains(collective.call.unit)) all[key] = collective;
    }
  }
  return all;
}

RankInput input_of(const RankEvents& rank, const ClockOffset& clock) {
  RankInput input(rank);
  for (auto& event : input.events) event.time -= clock.ahead;
  if (!input.events.empty()) input.last = input.events.back().time;
  input.engines = engines_of(input.events);
  input.collectives = collectives_of_all(input);
  for (const auto& event : input.events) {
    if (event.kind == EventKind::kFailed) input.failed.emplace(CollectiveKey{event.source, event.number}, event.time);
  }
  return input;
}

bool lives(const RankInput& input) {
  const auto process = input.rank->process;
  return process == ProcessState::kRunning || process == ProcessState::kStopped || process == ProcessState::kDebugged;
}

bool is_waiting(const RankInput& input) {
  return std::any_of(input.collectives.begin(), input.collectives.end(), [&](const auto& entry) {
    const auto& collective = entry.second;
    return collective.wait_began != 0 && collective.wait_ended == 0 && !input.failed.contains(entry.first);
  });
}

/// If ranks wait for each other now, their last events are old, and what they do since then is to be seen. Others may have nothing to do
/// with training any more, and end with their last events. Nor do those count that wait for this process, which draws.
void draw_until_now(std::vector<RankInput>& inputs, const std::vector<ClockOffset>& clocks) {
  const auto is_this = [](const RankInput& input) { return lives(input) && input.rank->writer.process == getpid(); };
  const auto hangs = [](const RankInput& input) { return lives(input) && is_waiting(input); };
  if (std::any_of(inputs.begin(), inputs.end(), is_this) || std::none_of(inputs.begin(), inputs.end(), hangs)) return;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (lives(inputs[i])) inputs[i].last = std::max(inputs[i].last, events::now() - clocks[i].ahead);
  }
}

/// When a rank made a call, and what it had done before.
struct Post {
  std::int64_t time = 0;
  std::int64_t rank = 0;
  std::string before;
};

/// The calls of all ranks.
class Posts {
 public:
  explicit Posts(const std::vector<RankInput>& inputs) {
    for (const auto& input : inputs) {
      end_ = std::max(end_, input.last);
      for (std::uint32_t source = 0; source < input.rank->sources.size(); ++source) rows_[input.row_of(source)].push_back(&input);
      for (const auto& [key, collective] : input.collectives) {
        if (collective.posted == 0) continue;
        calls_[{input.row_of(key.first), key.second}].push_back(
            {.time = collective.posted, .rank = input.rank->writer.rank, .before = text_of(input, collective.before)});
      }
    }
  }

  /// The last moment of all ranks.
  std::int64_t end() const { return end_; }

  /// The last of the other ranks of the row to make the call, if one has.
  std::optional<Post> last(const RankInput& of, const CollectiveKey& key) const {
    const auto calls = calls_.find({of.row_of(key.first), key.second});
    std::optional<Post> last;
    if (calls == calls_.end()) return last;
    for (const auto& post : calls->second) {
      if (post.rank != of.rank->writer.rank && (!last || post.time > last->time)) last = post;
    }
    return last;
  }

  /// A rank of the row that has not made the call yet, with what it does now.
  std::optional<Post> missing(const RankInput& of, const CollectiveKey& key) const {
    const auto row = of.row_of(key.first);
    const auto calls = calls_.find({row, key.second});
    const auto members = rows_.find(row);
    if (calls == calls_.end() || members == rows_.end()) return {};
    for (const auto* member : members->second) {
      const auto rank = member->rank->writer.rank;
      const auto is_it = [&](const Post& post) { return post.rank == rank; };
      if (rank == of.rank->writer.rank || std::any_of(calls->second.begin(), calls->second.end(), is_it)) continue;
      return Post{.time = end_, .rank = rank, .before = text_of(*member, activity_at_end(*member))};
    }
    return {};
  }

 private:
  static std::string text_of(const RankInput& input, const Activity& activity) {
    return activity_text(activity.kind, input.name(activity.unit), input.name(activity.next));
  }

  static Activity activity_at_end(const RankInput& input) {
    bool has_ended = false;  // its last wait
    for (auto event = input.events.rbegin(); event != input.events.rend(); ++event) {
      has_ended = has_ended || event->kind == EventKind::kWaitEnded || event->kind == EventKind::kFailed;
      if (event->kind == EventKind::kWaitBegan && !has_ended) return {.kind = Activity::Kind::kWaiting, .unit = event->unit};
      if (is_position(*event)) return {.kind = kind_after(*event), .unit = event->unit};
    }
    return {};
  }

  std::map<std::string, std::vector<const RankInput*>> rows_;
  std::map<std::pair<std::string, std::uint64_t>, std::vector<Post>> calls_;  // by row and number
  std::int64_t end_ = 0;
};

/// Draws one rank.
class RankDrawing {
 public:
  RankDrawing(const RankInput& input, NameTable& names) : input_(input), names_(names) {}

  void draw_computation(RankTimeline& rank) {
    const auto engine = input_.engines.front();
    bool in_step = false;
    std::array<std::int64_t, 2> sent{};  // until the last step began: all, and what peers have read
    for (const auto& event : input_.events) {
      if (event.source != engine) continue;
      take_memory(rank, event);
      if (!is_position(event)) continue;
      if (!rank.compute.empty()) rank.compute.back().ended = event.time;
      rank.compute.push_back({.began = event.time, .ended = input_.last, .kind = kind_after(event), .unit = name(event.unit)});
      if (event.kind == EventKind::kStepBegan) {
        const auto read_by_peers = static_cast<std::int64_t>(event.number);
        if (!rank.steps.empty()) {
          auto& before = rank.steps.back();
          before.ended = event.time;
          before.sent = event.bytes - sent[0];
          before.read_by_peers = read_by_peers - sent[1];
        }
        sent = {event.bytes, read_by_peers};
        const auto before = rank.steps.empty() ? ended_before_ : rank.steps.back().number;
        rank.steps.push_back({.number = before + 1, .began = event.time, .ended = input_.last});
        in_step = true;
      }
      if (event.kind == EventKind::kBackwardEnded && event.number > 0) {
        if (in_step) {
          rank.steps.back().number = static_cast<std::int64_t>(event.number);
          rank.steps.back().is_whole = true;
        } else {
          ended_before_ = static_cast<std::int64_t>(event.number);
        }
      }
    }
  }

  void draw_collectives(RankTimeline& rank, const Posts& posts) {
    std::vector<const std::pair<const CollectiveKey, Collective>*> in_order;
    for (const auto& entry : input_.collectives) {
      if (began(entry.second) != 0) in_order.push_back(&entry);
    }
    std::stable_sort(in_order.begin(), in_order.end(), [](const auto* a, const auto* b) { return began(a->second) < began(b->second); });
    std::map<CollectiveKey, Collective> under_way;
    for (const auto* entry : in_order) {
      const auto& [key, collective] = *entry;
      std::erase_if(under_way, [now = began(collective)](const auto& other) {
        const auto done = other.second.arrived != 0 ? other.second.arrived : other.second.wait_ended;
        return done != 0 && done <= now;
      });
      rank.collectives.push_back(span_of(key, collective, posts, under_way));
      under_way.emplace(key, collective);
    }
  }

 private:
  static std::int64_t began(const Collective& collective) { return collective.posted != 0 ? collective.posted : collective.wait_began; }
  std::uint32_t name(std::uint32_t local) { return names_.add(input_.name(local)); }

  /// What is held is told behind the position at which it is.
  void take_memory(RankTimeline& rank, const Event& event) {
    if (is_position(event)) position_ = event.time;
    if (event.kind == EventKind::kMemoryPeaked) {
      rank.peaks.push_back({event.time, event.bytes, name(event.unit)});
      if (!rank.steps.empty()) rank.steps.back().peak = std::max(rank.steps.back().peak, event.bytes);
    }
    if (event.number >= held_.size()) return;
    if (event.kind == EventKind::kKindPeaked && !rank.steps.empty()) {
      auto& peak = rank.steps.back().peaks[event.number];
      peak = std::max(peak, event.bytes);
    }
    if (event.kind != EventKind::kMemoryHeld) return;
    held_[event.number] = event.bytes;
    known_.set(event.number);
    if (!known_.all()) return;
    if (rank.memory.empty() || rank.memory.back().time != position_) rank.memory.push_back({.time = position_});
    rank.memory.back().held = held_;
  }

  CollectiveSpan span_of(const CollectiveKey& key, Collective collective, const Posts& posts,
                         const std::map<CollectiveKey, Collective>& under_way) {
    CollectiveSpan span;
    const auto& call = collective.call;
    span.lane = lane_of(input_.text_of(call.operation));
    span.unit = name(call.unit);
    span.operation = name(call.operation);
    span.row = names_.add(input_.row_of(key.first));
    span.number = key.second;
    span.bytes = call.bytes;
    span.in_backward = collective.in_backward;
    if (collective.wait_ended == 0) {
      const auto failure = input_.failed.find(key);
      span.state = failure == input_.failed.end() ? CollectiveSpan::State::kOpen : CollectiveSpan::State::kFailed;
      collective.wait_ended = failure == input_.failed.end() ? posts.end() : failure->second;
    }
    span.times = {began(collective), collective.wait_began, collective.arrived, collective.wait_ended};
    if (collective.wait_began != 0) {
      auto last = posts.last(input_, key);
      if (auto missing = posts.missing(input_, key); missing && span.state != CollectiveSpan::State::kDone) last = missing;
      const auto peer = last ? LastPeer{.posted = last->time, .rank = last->rank} : LastPeer{};
      span.reasons = reasons_of(collective, peer, queued_bytes(collective, peer, under_way));
      if (span.reasons[static_cast<std::size_t>(WaitReason::kLateRank)] > 0) {
        span.late_rank = last->rank;
        span.late_rank_was = names_.add(last->before);
      }
    }
    span.track = track_of(span);
    return span;
  }

  /// The first track of the lane that is free.
  std::uint32_t track_of(const CollectiveSpan& span) {
    auto& tracks = tracks_[span.lane];
    std::uint32_t track = 0;
    while (track < tracks.size() && tracks[track] > span.times.began) ++track;
    if (track == tracks.size()) tracks.push_back(0);
    tracks[track] = span.times.ended;
    return track;
  }

  const RankInput& input_;
  NameTable& names_;
  BytesByKind held_ = {};
  std::bitset<events::kMemoryKinds.size()> known_;    ///< Of which kinds it has been told what is held.
  std::int64_t position_ = 0;                         ///< When the computation moved last.
  std::int64_t ended_before_ = 0;                     ///< The last step whose beginning is no longer kept.
  std::map<Lane, std::vector<std::int64_t>> tracks_;  ///< When the last one in it ends.
};

/// Leaves out what lies outside of the rank's steps. False if it has none of them.
bool cut(RankTimeline& rank, const StepRange& steps) {
  std::erase_if(rank.steps, [&](const StepSpan& step) { return step.number < steps.first || step.number > steps.second; });
  if (rank.steps.empty()) return false;
  const auto begin = rank.steps.front().began;
  const auto end = rank.steps.back().ended;
  std::erase_if(rank.compute, [&](const ComputeSpan& span) { return span.began < begin || span.began >= end; });
  std::erase_if(rank.collectives, [&](const CollectiveSpan& span) { return span.times.ended <= begin || span.times.began >= end; });
  std::erase_if(rank.memory, [&](const MemoryMoment& moment) { return moment.time < begin || moment.time > end; });
  std::erase_if(rank.peaks, [&](const MemoryPeak& peak) { return peak.time < begin || peak.time > end; });
  return true;
}

void find_bounds(Timeline& timeline) {
  bool is_first = true;
  const auto take = [&](std::int64_t began, std::int64_t ended) {
    timeline.began = is_first ? began : std::min(timeline.began, began);
    timeline.ended = is_first ? ended : std::max(timeline.ended, ended);
    is_first = false;
  };
  for (const auto& rank : timeline.ranks) {
    for (const auto& span : rank.compute) take(span.began, span.ended);
    for (const auto& span : rank.collectives) take(span.times.began, span.times.ended);
    for (const auto& peak : rank.peaks) take(peak.time, peak.time);
  }
}

}  // namespace

std::int64_t waited(const CollectiveSpan& collective) {
  return collective.times.wait_began == 0 ? 0 : collective.times.ended - collective.times.wait_began;
}

Timeline timeline_of(const std::vector<RankEvents>& ranks, const std::optional<StepRange>& steps) {
  if (ranks.empty()) throw Error("there are no files of events; start the ranks with FSDP_EVENTS=FOLDER");
  const auto clocks = clock_offsets(ranks);
  std::vector<RankInput> inputs;
  for (std::size_t i = 0; i < ranks.size(); ++i) inputs.push_back(input_of(ranks[i], clocks[i]));
  draw_until_now(inputs, clocks);
  const Posts posts(inputs);
  NameTable names;
  Timeline timeline;
  bool has_steps = false;
  std::set<std::int64_t> there;
  std::int64_t world_size = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto& rank = timeline.ranks.emplace_back();
    rank.writer = ranks[i].writer;
    rank.clock = clocks[i];
    there.insert(rank.writer.rank);
    world_size = std::max(world_size, rank.writer.world_size);
    RankDrawing drawing(inputs[i], names);
    drawing.draw_computation(rank);
    drawing.draw_collectives(rank, posts);
    if (!steps) continue;
    if (cut(rank, *steps)) {
      has_steps = true;
    } else {
      const auto writer = rank.writer;
      rank = {};
      rank.writer = writer;
      rank.clock = clocks[i];
    }
  }
  if (steps && !has_steps) {
    throw Error("--steps " + std::to_string(steps->first) + "-" + std::to_string(steps->second) +
                ": no rank has kept events of these steps; the last 16384 events of each rank are kept");
  }
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    if (!there.contains(rank)) timeline.missing.push_back(rank);
  }
  find_bounds(timeline);
  timeline.names = names.take();
  return timeline;
}

}  // namespace fsdp::report
