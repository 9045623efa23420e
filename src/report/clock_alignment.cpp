#include "report/clock_alignment.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace fsdp::report {

using events::EventKind;

namespace {

constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

/// When one rank made a call, and had what the others sent.
struct Exchange {
  std::size_t host = 0;
  std::int64_t posted = 0;
  std::int64_t ended = 0;
};

/// Every rank gets something of every other one. A message that goes one way, such as a scatter, bounds one side only, for some ranks.
bool goes_both_ways(std::string_view operation) {
  return operation.find("all-gather") != std::string_view::npos || operation.find("reduce-scatter") != std::string_view::npos;
}

/// Hosts, and the shortest times from one's call to another one's end, each by its own clock.
class Hosts {
 public:
  explicit Hosts(const std::vector<RankEvents>& ranks) {
    for (const auto& rank : ranks) {
      const auto [place, is_new] = places_.try_emplace(rank.writer.clock, ahead_of_epoch_.size());
      if (is_new) ahead_of_epoch_.push_back(rank.writer.ahead_of_epoch);
      of_rank_.push_back(place->second);
    }
    shortest_.assign(size() * size(), kNone);
    if (size() > 1) compare(ranks);
  }

  std::vector<ClockOffset> offsets() const {
    std::vector<ClockOffset> of_host(size());
    std::vector<bool> is_known(size());
    std::vector<std::size_t> next = {0};
    if (size() > 0) is_known[0] = true;
    for (std::size_t i = 0; i < next.size(); ++i) {
      const auto from = next[i];
      for (std::size_t to = 0; to < size(); ++to) {
        const auto out = shortest(from, to);
        const auto back = shortest(to, from);
        // Where a host does not wait for its device, it may be done with a call before another has posted it: that bounds nothing.
        if (is_known[to] || out == kNone || back == kNone || out + back < 0) continue;
        of_host[to] = {.ahead = of_host[from].ahead + (out - back) / 2, .within = of_host[from].within + (out + back) / 2};
        is_known[to] = true;
        next.push_back(to);
      }
    }
    for (std::size_t to = 0; to < size(); ++to) {
      if (!is_known[to]) of_host[to] = {.ahead = ahead_of_epoch_[0] - ahead_of_epoch_[to], .within = -1};
    }
    std::vector<ClockOffset> all;
    for (const auto host : of_rank_) all.push_back(of_host[host]);
    return all;
  }

 private:
  std::size_t size() const { return ahead_of_epoch_.size(); }
  std::int64_t shortest(std::size_t from, std::size_t to) const { return shortest_[from * size() + to]; }

  void compare(const std::vector<RankEvents>& ranks) {
    std::map<std::pair<std::string_view, std::uint64_t>, std::vector<Exchange>> calls;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      std::map<std::pair<std::uint32_t, std::uint64_t>, Exchange> of_rank;
      for (const auto& event : ranks[i].events) {
        if (event.source >= ranks[i].sources.size() || !goes_both_ways(ranks[i].names[event.operation])) continue;
        auto& call = of_rank[{event.source, event.number}];
        call.host = of_rank_[i];
        if (event.kind == EventKind::kPosted) call.posted = event.time;
        if (event.kind == EventKind::kArrived || (event.kind == EventKind::kWaitEnded && call.ended == 0)) call.ended = event.time;
      }
      for (const auto& [key, call] : of_rank) calls[{ranks[i].sources[key.first], key.second}].push_back(call);
    }
    for (const auto& [key, of_ranks] : calls) {
      for (const auto& a : of_ranks) {
        for (const auto& b : of_ranks) {
          if (a.host == b.host || a.posted == 0 || b.ended == 0) continue;
          auto& time = shortest_[a.host * size() + b.host];
          time = std::min(time, b.ended - a.posted);
        }
      }
    }
  }

  std::map<std::uint64_t, std::size_t> places_;  // by clock
  std::vector<std::int64_t> ahead_of_epoch_;
  std::vector<std::size_t> of_rank_;
  std::vector<std::int64_t> shortest_;
};

}  // namespace

std::vector<ClockOffset> clock_offsets(const std::vector<RankEvents>& ranks) { return Hosts(ranks).offsets(); }

}  // namespace fsdp::report
