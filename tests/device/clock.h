#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sim {

/// An operation of a stream: the `epoch`-th one of `agent`, the stream's place in clocks. Agent 0 has done nothing.
struct Access {
  std::size_t agent = 0;
  std::uint64_t epoch = 0;
  std::size_t operation = 0;  ///< Its name, see operation_name().
};

/// A vector clock: what a stream, an event, a collective or a thread of the host knows to be over. For each stream, the number of its
/// operations that are. Beside that a time: when all of it has ended, in simulated nanoseconds. Joining two clocks takes the later of both.
class Clock {
 public:
  void join(const Clock& other) {
    if (epochs_.size() < other.epochs_.size()) epochs_.resize(other.epochs_.size());
    for (std::size_t agent = 0; agent < other.epochs_.size(); ++agent) epochs_[agent] = std::max(epochs_[agent], other.epochs_[agent]);
    time_ = std::max(time_, other.time_);
  }
  /// One more operation of `agent`, which takes `duration`. Its epoch.
  std::uint64_t tick(std::size_t agent, std::uint64_t duration) {
    if (epochs_.size() <= agent) epochs_.resize(agent + 1);
    time_ += duration;
    return ++epochs_[agent];
  }
  void pass(std::uint64_t duration) { time_ += duration; }
  void pass_until(std::uint64_t time) { time_ = std::max(time_, time); }

  bool knows(const Access& access) const { return epoch_of(access.agent) >= access.epoch; }
  bool knows(const Clock& other) const {
    for (std::size_t agent = 0; agent < other.epochs_.size(); ++agent) {
      if (epoch_of(agent) < other.epochs_[agent]) return false;
    }
    return true;
  }
  bool knows_nothing() const { return epochs_.empty() && time_ == 0; }
  std::uint64_t time() const { return time_; }

 private:
  std::uint64_t epoch_of(std::size_t agent) const { return agent < epochs_.size() ? epochs_[agent] : 0; }

  std::vector<std::uint64_t> epochs_;
  std::uint64_t time_ = 0;
};

}  // namespace sim
