#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"

// What the engine's memory should be, from shapes, the rules of alignment and the documented schedule alone. Shares no code with the
// library.
namespace fsdp::testing {

/// Bytes of one unit, whole and per rank.
struct UnitBytes {
  std::int64_t full = 0;
  std::int64_t shard = 0;
  std::int64_t trainable_full = 0;
  std::int64_t trainable_shard = 0;
  std::int64_t staging(std::int64_t ranks) const { return (ranks - 1) * trainable_shard; }
};

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// Parameters of one dtype, trainable and frozen apart, lie end to end, each from a multiple of 64 bytes on; the ranks' shares are equal
/// multiples of 64 bytes.
inline UnitBytes unit_bytes(const std::vector<at::Tensor>& parameters, std::int64_t ranks) {
  std::map<std::pair<bool, at::ScalarType>, std::int64_t> ends;
  for (const auto& parameter : parameters) {
    auto& end = ends[{parameter.requires_grad(), parameter.scalar_type()}];
    end = round_up(end, 64) + parameter.numel() * static_cast<std::int64_t>(parameter.element_size());
  }
  UnitBytes bytes;
  for (const auto& [key, end] : ends) {
    const std::int64_t shard = round_up((end + ranks - 1) / ranks, 64);
    bytes.shard += shard;
    bytes.full += ranks * shard;
    if (!key.first) continue;
    bytes.trainable_shard += shard;
    bytes.trainable_full += ranks * shard;
  }
  return bytes;
}

/// Units by name, enclosing ones first; the root is "".
using UnitTable = std::vector<std::pair<std::string, UnitBytes>>;

/// Each parameter belongs to the unit with the longest name that begins its own.
inline UnitTable unit_table(const torch::nn::Module& module, const std::vector<std::string>& unit_names, std::int64_t ranks) {
  std::map<std::string, std::vector<at::Tensor>> parameters;
  for (const auto& item : module.named_parameters()) {
    std::string owner;
    for (const auto& name : unit_names) {
      if (name.size() > owner.size() && item.key().starts_with(name + ".")) owner = name;
    }
    parameters[owner].push_back(item.value());
  }
  UnitTable table;
  for (const auto& name : unit_names) table.emplace_back(name, unit_bytes(parameters[name], ranks));
  return table;
}

/// The kinds of memory that come and go within a step.
struct LiveBytes {
  std::int64_t main_gradients = 0;
  std::int64_t gathered = 0;
  std::int64_t unreduced = 0;
  std::int64_t staging = 0;
  std::int64_t sum() const { return main_gradients + gathered + unreduced + staging; }
};

struct PredictedStep {
  std::map<std::string, LiveBytes> live;  ///< At the moments that were marked.
  LiveBytes peak;                         ///< Of each kind by itself.
  std::int64_t peak_sum = 0;
  std::size_t peak_slots = 0;  ///< Leased at once.
  std::int64_t largest_slot = 0;
};

/// Plays the documented schedule for one step at a time. The script says what computes: touch(unit), gradient(unit). The second time it is
/// played, read-ahead knows the order from the first time.
class ScheduleModel {
 public:
  ScheduleModel(UnitTable units, std::int64_t ranks, Placements placements, bool reshard_after_forward, int prefetch_depth)
      : units_(units.begin(), units.end()),
        order_(std::move(units)),
        ranks_(ranks),
        placements_(placements),
        reshard_after_forward_(reshard_after_forward),
        prefetch_depth_(prefetch_depth) {}

  void begin_step() {
    step_ = {};
    begin_pass(0);
    grew();
  }

  void touch(const std::string& unit) {
    const bool within = has_current_ && encloses(unit, current_);
    if (unit == current_ && has_current_) return;
    if (within && gathered_.contains(unit)) return;
    if (pass_ == 1 && !backward_begun_) begin_backward();
    moves_now_.push_back(unit);
    if (!within) {
      if (pass_ == 1 && sync) {
        for (const auto& collecting : std::vector<std::string>(collecting_)) {
          if (collected_now_.contains(collecting) && !related(collecting, unit)) reduce(collecting);
        }
      }
      for (auto it = gathered_.begin(); it != gathered_.end();) {
        const bool departs = used_.contains(it->first) && !related(it->first, unit);
        if (departs) used_.erase(it->first);
        it = departs && (pass_ == 1 || reshard_after_forward_) ? gathered_.erase(it) : std::next(it);
      }
      current_ = unit;
      has_current_ = true;
    }
    gather(unit);
    used_.insert(unit);
    read_ahead();
  }

  void gradient(const std::string& unit) {
    if (!backward_begun_) begin_backward();
    collected_now_.insert(unit);
    if (!sync) added_up_.insert(unit);
    if (std::find(collecting_.begin(), collecting_.end(), unit) != collecting_.end()) return;
    const bool in_place = (placements_.gradients == Placement::kReplicated || ranks_ == 1) && !reduced_before_;
    if (in_place) {
      main_gradients_[unit] = units_[unit].trainable_full;
    } else {
      // At most two units' buffers at a time, beside those of enclosing units.
      const auto others = std::count_if(collecting_.begin(), collecting_.end(), [&](const auto& other) { return !related(other, unit); });
      while (!reducing_.empty() && static_cast<std::size_t>(others) + reducing_.size() > 1) finish_oldest();
      unreduced_[unit] = units_[unit].trainable_full;
    }
    collecting_.push_back(unit);
    grew();
  }

  /// The script changes from forward to backward.
  void begin_backward_pass() {
    begin_pass(1);
    backward_begun_ = false;
    collected_now_.clear();
  }

  void end_backward() {
    gathered_.clear();
    used_.clear();
    has_current_ = false;
    if (sync) {
      for (const auto& [name, bytes] : order_) {
        if (std::find(collecting_.begin(), collecting_.end(), name) != collecting_.end()) reduce(name);
      }
      while (!reducing_.empty()) finish_oldest();
      reduced_before_ = true;
    }
    begin_pass(0);
  }

  void zero_grad() {
    reduced_before_ = false;
    main_gradients_.clear();
  }
  void mark(const std::string& moment) { step_.live[moment] = now(); }
  const PredictedStep& step() const { return step_; }

  bool sync = true;
  bool staged = true;  ///< What peers send is received somewhere. Ranks that share memory read it where it lies.

 private:
  static bool encloses(const std::string& outer, const std::string& inner) {
    return outer.empty() || inner == outer || inner.starts_with(outer + ".");
  }
  static bool related(const std::string& a, const std::string& b) { return encloses(a, b) || encloses(b, a); }

  void begin_pass(std::size_t pass) {
    if (!moves_now_.empty()) moves_before_[pass_] = std::exchange(moves_now_, {});
    pass_ = pass;
  }

  void begin_backward() {
    backward_begun_ = true;
    read_ahead();
  }

  void read_ahead() {
    const auto& moves = moves_before_[pass_];
    std::vector<std::string> next;
    for (std::size_t i = moves_now_.size(); i < moves.size() && next.size() < static_cast<std::size_t>(prefetch_depth_); ++i) {
      if (std::find(next.begin(), next.end(), moves[i]) == next.end()) next.push_back(moves[i]);
    }
    for (const auto& unit : next) gather(unit);
  }

  void gather(const std::string& unit) {
    gathered_[unit] = units_[unit].full;
    grew();
  }

  void reduce(const std::string& unit) {
    if (reducing_.size() == 2) finish_oldest();
    // Where several backwards' gradients were kept, the shard takes the place of staging.
    const bool in_place =
        placements_.gradients == Placement::kSharded && ranks_ > 1 && added_up_.erase(unit) > 0 && !main_gradients_.contains(unit);
    if (in_place) {
      to_move_.insert(unit);
    } else {
      main_gradients_[unit] = placements_.gradients == Placement::kReplicated ? units_[unit].trainable_full : units_[unit].trainable_shard;
    }
    collecting_.erase(std::find(collecting_.begin(), collecting_.end(), unit));
    reducing_.push_back(unit);
    if (ranks_ > 1 && staged) staging_[unit] = units_[unit].staging(ranks_);
    grew();
  }

  void finish_oldest() {
    staging_.erase(reducing_.front());
    if (to_move_.erase(reducing_.front()) > 0) {
      main_gradients_[reducing_.front()] = units_[reducing_.front()].trainable_shard;
      grew();
    }
    unreduced_.erase(reducing_.front());
    reducing_.pop_front();
  }

  LiveBytes now() const {
    LiveBytes live;
    if (ranks_ == 1) {
      // Its main parameters are the whole ones.
    } else if (placements_.parameters == Placement::kReplicated) {
      for (const auto& [name, bytes] : order_) live.gathered += bytes.full;
    } else {
      for (const auto& [name, bytes] : gathered_) live.gathered += bytes;
    }
    for (const auto& [name, bytes] : main_gradients_) live.main_gradients += bytes;
    for (const auto& [name, bytes] : unreduced_) live.unreduced += bytes;
    for (const auto& [name, bytes] : staging_) live.staging += bytes;
    return live;
  }

  void grew() {
    const auto live = now();
    step_.peak.main_gradients = std::max(step_.peak.main_gradients, live.main_gradients);
    step_.peak.gathered = std::max(step_.peak.gathered, live.gathered);
    step_.peak.unreduced = std::max(step_.peak.unreduced, live.unreduced);
    step_.peak.staging = std::max(step_.peak.staging, live.staging);
    step_.peak_sum = std::max(step_.peak_sum, live.sum());
    std::size_t slots = unreduced_.size() + staging_.size();
    if (placements_.parameters == Placement::kSharded && ranks_ > 1) slots += gathered_.size();
    step_.peak_slots = std::max(step_.peak_slots, slots);
    for (const auto& [name, bytes] : order_) step_.largest_slot = std::max(step_.largest_slot, bytes.full);
  }

  std::map<std::string, UnitBytes> units_;
  UnitTable order_;
  std::int64_t ranks_;
  Placements placements_;
  bool reshard_after_forward_;
  int prefetch_depth_;

  PredictedStep step_;
  std::size_t pass_ = 0;  // 0 forward, 1 backward
  bool backward_begun_ = false;
  std::array<std::vector<std::string>, 2> moves_before_;
  std::vector<std::string> moves_now_;
  bool has_current_ = false;
  std::string current_;
  std::set<std::string> used_;                          // touched since the computation last departed from it
  std::map<std::string, std::int64_t> main_gradients_;  // from the first reduction, or where they are collected in place, to zero_grad
  std::map<std::string, std::int64_t> gathered_;
  std::vector<std::string> collecting_;
  std::set<std::string> collected_now_;  // gradients of this backward arrived
  std::deque<std::string> reducing_;
  std::set<std::string> added_up_;  // gradients of backwards without synchronization are in the buffer
  std::set<std::string> to_move_;   // the result is in the unreduced buffer until the reduction is complete
  std::map<std::string, std::int64_t> unreduced_;
  std::map<std::string, std::int64_t> staging_;
  bool reduced_before_ = false;
};

}  // namespace fsdp::testing
