#include "report/timeline.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

#include "fsdp/error.h"

namespace fsdp::report {

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

bool is_this_process(const RankNow& rank) { return lives(rank.left) && rank.left.writer.process == getpid(); }

/// Why ranks wait in vain. Those that wait for this process, which draws, do not, nor do ranks of which one still moves.
Why why_of(const std::vector<RankNow>& ranks) {
  if (std::any_of(ranks.begin(), ranks.end(), is_this_process)) return {};
  auto why = explain(ranks);
  return why.cause == Cause::kSlow ? Why{} : why;
}

/// Until when each rank is drawn: to its last event, or to its last sign of life if ranks wait in vain. Others may have nothing to do with
/// training any more.
std::vector<std::int64_t> ends_of(const std::vector<RankNow>& ranks, const Why& why) {
  std::vector<std::int64_t> ends;
  for (const auto& rank : ranks) ends.push_back(why.cause == Cause::kNothing ? rank.last_event : rank.last_sign);
  return ends;
}

/// When a rank made a call, and what it had done before. Where the others waited in vain: the last moment of all, and what it did then.
struct Post {
  const RankNow* rank = nullptr;
  std::int64_t time = 0;
  Activity before;
  bool in_vain = false;

  std::string text() const { return events::activity_text(before.kind, rank->text_of(before.unit), rank->text_of(before.next)); }
};

/// The calls of all ranks.
class Posts {
 public:
  Posts(const std::vector<RankNow>& ranks, const Why& why, std::int64_t end) : ranks_(ranks), end_(end) {
    for (const auto& rank : ranks) {
      if (rank.rank() == why.rank) guilty_ = &rank;
      for (const auto& [row, last] : rank.rows()) rows_[row].push_back(&rank);
      for (const auto& [key, collective] : rank.collectives) {
        if (collective.posted != 0)
          calls_[rank.which(key)].push_back({.rank = &rank, .time = collective.posted, .before = collective.before});
      }
    }
  }

  /// The last moment of all ranks.
  std::int64_t end() const { return end_; }

  /// The last of the other ranks of the row to make the call. If the wait was in vain, one that has not made it yet, or the rank that has
  /// made all wait.
  Post peer(const RankNow& of, const CollectiveKey& key) const {
    const auto which = of.which(key);
    if (of.collectives.at(key).wait_ended == 0) {
      if (const auto* late = missing(of, which)) return {.rank = late, .time = end_, .before = activity_at_end(*late), .in_vain = true};
    }
    Post last;
    const auto calls = calls_.find(which);
    if (calls == calls_.end()) return last;
    for (const auto& post : calls->second) {
      if (post.rank != &of && post.time > last.time) last = post;
    }
    return last;
  }

  /// The rank that delayed a peer: itself, or the rank for which it waited, and so on. Ranks that wait for each other have none.
  Post cause(const Post& peer) const {
    auto first = peer;
    std::set<const RankNow*> seen;
    while (first.before.kind == Activity::Kind::kWaiting && first.rank != guilty_) {
      if (first.in_vain && !seen.insert(first.rank).second) return peer;
      const auto awaited = first.rank->collectives.find(first.before.awaited);
      if (awaited == first.rank->collectives.end()) break;
      const auto next = this->peer(*first.rank, awaited->first);
      const bool is_kept = next.in_vain || (next.rank != nullptr && is_for_peer(awaited->second, next.time));
      if (!is_kept || (!next.in_vain && next.time >= first.time)) break;
      first = next;
    }
    return first;
  }

 private:
  /// If there are several, the one for which all waited.
  const RankNow* missing(const RankNow& of, const RowNumber& which) const {
    const auto members = rows_.find(which.row);
    if (members == rows_.end()) return nullptr;
    const RankNow* late = nullptr;
    for (const auto* member : members->second) {
      if (member == &of) continue;
      if (member == guilty_) return member;
      if (late == nullptr && !member->has_called(which)) late = member;
    }
    return late;
  }

  static Activity activity_at_end(const RankNow& rank) {
    const std::pair<const CollectiveKey, Collective>* last = nullptr;  // that it waited for, also in vain, if it has not gone on
    for (const auto& one : rank.collectives) {
      const auto& [key, collective] = one;
      if (collective.wait_began < rank.last_move || collective.wait_began == 0 || collective.wait_ended != 0) continue;
      if (last == nullptr || collective.wait_began > last->second.wait_began) last = &one;
    }
    if (last == nullptr) return rank.position;
    return {.kind = Activity::Kind::kWaiting, .unit = last->second.call.unit, .awaited = last->first};
  }

  const std::vector<RankNow>& ranks_;
  const std::int64_t end_;
  const RankNow* guilty_ = nullptr;
  std::map<std::string, std::vector<const RankNow*>> rows_;
  std::map<RowNumber, std::vector<Post>> calls_;
};

/// Draws one rank.
class RankDrawing {
 public:
  RankDrawing(const RankNow& input, std::int64_t end, NameTable& names) : input_(input), end_(end), names_(names) {}

  void draw_computation(RankTimeline& rank) {
    static_cast<events::EngineReplay&>(rank) = input_.engines.front();
    rank.end_at(end_);
    for (auto& step : rank.steps) step.peak_unit = name(step.peak_unit);
    for (auto& span : rank.compute) span.unit = name(span.unit);
    for (auto& peak : rank.peaks) peak.unit = name(peak.unit);
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
  std::uint32_t name(std::uint32_t local) { return names_.add(std::string(input_.text_of(local))); }

  CollectiveSpan span_of(const CollectiveKey& key, Collective collective, const Posts& posts,
                         const std::map<CollectiveKey, Collective>& under_way) {
    CollectiveSpan span;
    const auto& call = collective.call;
    span.lane = lane_of(input_.text_of(call.operation));
    span.unit = name(call.unit);
    span.operation = name(call.operation);
    span.row = names_.add(input_.which(key).row);
    span.number = key.second;
    span.bytes = call.bytes;
    span.in_backward = collective.in_backward;
    const auto peer = posts.peer(input_, key);
    if (collective.wait_ended == 0) {
      span.state = collective.failed == 0 ? CollectiveSpan::State::kOpen : CollectiveSpan::State::kFailed;
      const auto end = input_.left.process == ProcessState::kDead ? end_ : posts.end();
      collective.wait_ended = collective.failed == 0 ? std::max({end, collective.posted, collective.wait_began}) : collective.failed;
    }
    span.times = {began(collective), collective.wait_began, collective.arrived, collective.wait_ended};
    if (collective.wait_began != 0) {
      span.reasons = reasons_of(collective, peer.time, queued_bytes(collective, peer.time, under_way));
      if (peer.in_vain || late_part(collective, peer.time) > 0) {
        const auto cause = posts.cause(peer);
        span.late_rank = cause.rank->rank();
        span.late_rank_was = names_.add(cause.text());
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

  const RankNow& input_;
  const std::int64_t end_;
  NameTable& names_;
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

bool is_unfinished(const CollectiveSpan& collective) {
  return collective.times.wait_began != 0 && collective.state != CollectiveSpan::State::kDone;
}

Timeline timeline_of(std::vector<RankEvents> run, const std::optional<StepRange>& steps) {
  const auto ranks = ranks_of(std::move(run));
  Timeline timeline;
  timeline.why = why_of(ranks);
  const auto ends = ends_of(ranks, timeline.why);
  const Posts posts(ranks, timeline.why, *std::max_element(ends.begin(), ends.end()));
  NameTable names;
  bool has_steps = false;
  std::set<std::int64_t> there;
  std::int64_t world_size = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto& rank = timeline.ranks.emplace_back();
    rank.writer = ranks[i].left.writer;
    rank.clock = ranks[i].clock;
    there.insert(rank.writer.rank);
    world_size = std::max(world_size, rank.writer.world_size);
    RankDrawing drawing(ranks[i], ends[i], names);
    drawing.draw_computation(rank);
    drawing.draw_collectives(rank, posts);
    if (!steps) continue;
    if (cut(rank, *steps)) {
      has_steps = true;
    } else {
      const auto writer = rank.writer;
      rank = {};
      rank.writer = writer;
      rank.clock = ranks[i].clock;
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
