#include "report/waits.h"

#include <algorithm>
#include <optional>

namespace fsdp {

const char* to_string(WaitReason reason) {
  switch (reason) {
    case WaitReason::kLateRank:
      return "late rank";
    case WaitReason::kPrefetch:
      return "prefetch";
    case WaitReason::kQueue:
      return "queue";
    case WaitReason::kLink:
      return "link";
    case WaitReason::kHost:
      return "host";
  }
  return "";
}

namespace report {

using events::Event;
using events::EventKind;

namespace {

/// Where the computation is, event by event.
class Position {
 public:
  explicit Position(std::uint32_t engine) : engine_(engine) {}

  void take(const Event& event) {
    const bool began_pass = event.kind != EventKind::kEntered || computation_.pass() == Pass::kBetweenSteps;
    if (event.source == engine_ && computation_.take(event)) {
      if (began_pass) entered_in_pass_ = 0;
      if (event.kind != EventKind::kEntered) return;
      ++entered_;
      ++entered_in_pass_;
    } else if (event.kind == EventKind::kWaitBegan) {
      wait_ = {.kind = Activity::Kind::kWaiting, .unit = event.unit, .awaited = {event.source, event.number}};
    } else if (event.kind == EventKind::kWaitEnded || event.kind == EventKind::kFailed) {
      wait_.reset();
    }
  }

  Activity activity() const { return wait_.value_or(Activity{.kind = kind_of(computation_.pass()), .unit = computation_.unit()}); }
  bool in_backward() const { return computation_.pass() == Pass::kBackward; }
  /// How many units have been entered, and how many of them in this pass.
  std::int64_t entered() const { return entered_; }
  std::int64_t entered_in_pass() const { return entered_in_pass_; }

 private:
  using Pass = events::Whereabouts::Pass;

  const std::uint32_t engine_;
  events::Whereabouts computation_;
  std::optional<Activity> wait_;
  std::int64_t entered_ = 0;
  std::int64_t entered_in_pass_ = 0;
};

/// What a rank has done since its last call in a row.
struct SinceLastPost {
  std::int64_t longest = 0;
  Activity activity;
};

std::vector<Event> in_time(std::span<const Event> events) {
  // Threads take their places in the ring one after the other, but the time before that.
  std::vector<Event> sorted(events.begin(), events.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const Event& a, const Event& b) { return a.time < b.time; });
  return sorted;
}

constexpr std::string_view kGather = "all-gather";

}  // namespace

std::string activity_text(Activity::Kind kind, const std::string& unit, const std::string& next) {
  const auto moves = next.empty() || next == unit ? std::string() : ", before '" + next + "'";
  switch (kind) {
    case Activity::Kind::kForward:
      return "in forward" + events::of_unit_text(unit) + moves;
    case Activity::Kind::kBackward:
      return "in backward" + events::of_unit_text(unit) + moves;
    case Activity::Kind::kBetweenSteps:
      return "between steps";
    case Activity::Kind::kWaiting:
      return "waiting for " + (unit.empty() ? std::string("other ranks") : "a collective of '" + unit + "'");
    case Activity::Kind::kUnknown:
      break;
  }
  return "busy with something that its events don't tell";
}

std::map<CollectiveKey, Collective> collectives_of(std::span<const Event> events, std::uint32_t engine, const TextOf& text_of) {
  std::map<CollectiveKey, Collective> all;
  std::map<std::uint32_t, SinceLastPost> rows;
  std::map<CollectiveKey, std::int64_t> entered_at_post;
  Position position(engine);
  const Event* previous = nullptr;
  for (const Event& event : in_time(events)) {
    if (previous != nullptr) {
      auto activity = position.activity();
      if (event.kind == EventKind::kEntered && event.source == engine && activity.kind != Activity::Kind::kWaiting)
        activity.next = event.unit;
      for (auto& [row, since] : rows) {
        if (event.time - previous->time > since.longest) since = {.longest = event.time - previous->time, .activity = activity};
      }
    }
    position.take(event);
    const CollectiveKey key{event.source, event.number};
    switch (event.kind) {
      case EventKind::kPosted: {
        auto& collective = all[key];
        collective.call = event;
        collective.posted = event.time;
        collective.before = std::exchange(rows[event.source], {}).activity;
        entered_at_post[key] = position.entered();
        break;
      }
      case EventKind::kWaitBegan: {
        auto& collective = all[key];
        if (collective.posted == 0) collective.call = event;
        collective.wait_began = event.time;
        collective.in_backward = position.in_backward();
        const auto at_post = entered_at_post.find(key);
        collective.posted_on_demand = text_of(event.operation).find(kGather) != std::string_view::npos &&
                                      at_post != entered_at_post.end() && at_post->second == position.entered() &&
                                      position.entered_in_pass() > 1;
        break;
      }
      case EventKind::kArrived:
        all[key].arrived = event.time;
        break;
      case EventKind::kWaitEnded:
        all[key].wait_ended = event.time;
        break;
      case EventKind::kFailed:
        all[key].failed = event.time;
        break;
      case EventKind::kHeldStream:
        if (const auto found = all.find(key); found != all.end()) found->second.held_stream = event.bytes;
        break;
      default:
        break;
    }
    previous = &event;
  }
  return all;
}

std::int64_t late_part(const Collective& collective, std::int64_t last_call) {
  return std::clamp(last_call, collective.wait_began, collective.wait_ended) - collective.wait_began;
}

bool is_for_peer(const Collective& collective, std::int64_t last_call) {
  return 2 * late_part(collective, last_call) > collective.wait_ended - collective.wait_began;
}

std::array<std::int64_t, kWaitReasons> reasons_of(const Collective& collective, std::int64_t last_call, std::int64_t queued_bytes) {
  std::array<std::int64_t, kWaitReasons> reasons{};
  const auto of = [&](WaitReason reason) -> std::int64_t& { return reasons[static_cast<std::size_t>(reason)]; };
  const auto end = collective.wait_ended;
  of(WaitReason::kLateRank) = late_part(collective, last_call);
  const auto all_called = collective.wait_began + of(WaitReason::kLateRank);
  auto rest = end - all_called;
  if (collective.arrived != 0) of(WaitReason::kHost) = end - std::clamp(collective.arrived, all_called, end);
  rest -= of(WaitReason::kHost);
  const auto bytes = queued_bytes + collective.call.bytes;
  if (bytes > 0) {
    of(WaitReason::kQueue) =
        static_cast<std::int64_t>(static_cast<double>(rest) * static_cast<double>(queued_bytes) / static_cast<double>(bytes));
  }
  rest -= of(WaitReason::kQueue);
  of(collective.posted_on_demand ? WaitReason::kPrefetch : WaitReason::kLink) = rest;
  return reasons;
}

std::int64_t queued_bytes(const Collective& collective, std::int64_t last_call, const std::map<CollectiveKey, Collective>& all) {
  const auto all_called = std::max(collective.posted, last_call);
  std::int64_t bytes = 0;
  for (const auto& [key, other] : all) {
    if (other.posted == 0 || other.posted >= collective.posted) continue;
    const auto done = other.arrived != 0 ? other.arrived : other.wait_ended;
    if (done == 0 || done > all_called) bytes += other.call.bytes;
  }
  return bytes;
}

std::vector<StepRecord> steps_of(std::span<const Event> events, std::uint32_t engine, std::int64_t now) {
  std::vector<StepRecord> steps;
  bool ended = false;
  std::int64_t* section = nullptr;  // of the step, to which the time since `since` belongs
  std::int64_t since = 0;
  const auto go_to = [&](std::int64_t time, std::int64_t* next) {
    if (section != nullptr) *section += time - since;
    section = next;
    since = time;
  };
  for (const Event& event : in_time(events)) {
    if (event.source != engine) continue;
    if (event.kind == EventKind::kStepBegan) {
      go_to(event.time, nullptr);
      if (!steps.empty()) steps.back().ended = event.time;
      if (!steps.empty() && !ended) steps.pop_back();
      auto& step = steps.emplace_back();
      step.began = event.time;
      step.sent = event.bytes;
      step.read_by_peers = static_cast<std::int64_t>(event.number);
      ended = false;
    }
    if (steps.empty()) continue;
    auto& step = steps.back();
    if (event.kind == EventKind::kStepBegan) {
      go_to(event.time, &step.forward);
    } else if (event.kind == EventKind::kBackwardBegan) {
      go_to(event.time, &step.backward);
    } else if (event.kind == EventKind::kBackwardEnded) {
      ended = ended || event.number != 0;
      go_to(event.time, ended ? &step.between : &step.forward);
    } else if (event.kind == EventKind::kMemoryPeaked && event.bytes > step.peak) {
      step.peak = event.bytes;
      step.peak_unit = event.unit;
    }
  }
  go_to(now, nullptr);
  if (!steps.empty()) steps.back().ended = now;
  if (!steps.empty() && !ended) steps.pop_back();
  return steps;
}

}  // namespace report
}  // namespace fsdp
