#include "fsdp/simulate.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "fsdp/error.h"

namespace fsdp {
namespace {

using What = PlannedAction::What;

template <typename Named, typename Entries>
void check_names(const std::map<std::string, Named>& given, const Entries& entries, const char* what,
                 std::string Entries::value_type::*name) {
  for (const auto& [key, value] : given) {
    if (std::ranges::find(entries, key, name) != entries.end()) continue;
    std::string known;
    for (const auto& entry : entries) known += (known.empty() ? "'" : ", '") + entry.*name + "'";
    throw Error("simulate(): the plan has no " + std::string(what) + " '" + key + "'; it has " + known);
  }
}

void check(const Plan& plan, const SimulationOptions& options) {
  check_names(options.units, plan.units, "unit", &PlannedUnit::name);
  check_names(options.links, plan.links, "link", &PlannedLink::dim);
  const auto refuse = [](const std::string& what) { throw Error("simulate(): " + what); };
  const auto check_time = [&](const std::string& what, double time) {
    if (!std::isfinite(time) || time < 0) refuse(what + " is " + std::to_string(time) + "; give a finite number, 0 or more");
    return time > 0;
  };
  bool has_times = static_cast<bool>(options.delay_ms);
  for (const auto& [name, time] : options.units) {
    has_times |= check_time("forward_ms of unit '" + name + "'", time.forward_ms);
    has_times |= check_time("backward_ms of unit '" + name + "'", time.backward_ms);
  }
  for (const auto& [name, rate] : options.links) {
    has_times |= check_time("latency_us of link '" + name + "'", rate.latency_us);
    has_times |= check_time("bytes_per_s of link '" + name + "'", rate.bytes_per_s);
  }
  for (const auto& [rank, factor] : options.slow_ranks) {
    if (rank < 0 || rank >= plan.ranks) refuse("there is no rank " + std::to_string(rank) + " of " + std::to_string(plan.ranks));
    check_time("the factor of rank " + std::to_string(rank), factor);
  }
  if (options.steps < 1) refuse("steps is " + std::to_string(options.steps) + "; give 1 or more");
  check_time("jitter", options.jitter);
  has_times |= check_time("update_ms", options.update_ms);
  if (!has_times) refuse("no times are given, with which each step would take 0 ms; give units, links or update_ms");
}

/// All ranks of a plan. Times are in milliseconds since the beginning.
class SimulatedRanks {
 public:
  SimulatedRanks(const Plan& plan, const SimulationOptions& options)
      : plan_(plan),
        options_(options),
        alike_(options.slow_ranks.empty() && options.jitter == 0 && !options.delay_ms),
        random_(options.seed),
        now_(size(alike_ ? 1 : plan.ranks)),
        factors_(now_.size(), 1.0) {
    for (const auto& [rank, factor] : options.slow_ranks) factors_[size(rank)] = factor;
    for (const auto& unit : plan.units) unit_times_.push_back(value_of(options.units, unit.name));
    for (const auto& link : plan.links) rates_.push_back(value_of(options.links, link.dim));
    exposed_.resize(plan.units.size());
  }

  void step(std::int64_t step) {
    results_.clear();
    for (const auto& action : plan_.actions) {
      if (action.what == What::kCompute) compute(action, step);
      if (action.what == What::kPost) post(action);
      if (action.what == What::kWait) wait(action);
      if (action.what == What::kUpdate) compute_for(options_.update_ms);
    }
  }

  /// How many ranks are simulated. If nothing makes them differ, one stands for all.
  std::int64_t count() const { return static_cast<std::int64_t>(now_.size()); }
  double end() const { return *std::ranges::max_element(now_); }
  double computed() const { return computed_; }
  const std::vector<double>& exposed() const { return exposed_; }

 private:
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

  template <typename Value>
  static Value value_of(const std::map<std::string, Value>& values, const std::string& name) {
    const auto found = values.find(name);
    return found == values.end() ? Value() : found->second;
  }

  void compute(const PlannedAction& action, std::int64_t step) {
    const auto& time = unit_times_[action.unit];
    compute_for(action.share * (action.in_backward ? time.backward_ms : time.forward_ms));
    if (!options_.delay_ms) return;
    for (std::size_t rank = 0; rank < now_.size(); ++rank) {
      const double delay = action.share * options_.delay_ms(static_cast<std::int64_t>(rank), step, action.unit, action.in_backward);
      if (!std::isfinite(delay)) throw Error("simulate(): delay_ms of rank " + std::to_string(rank) + " is " + std::to_string(delay));
      now_[rank] += delay;
      computed_ += delay;
    }
  }

  void compute_for(double ms) {
    if (ms == 0) return;
    std::lognormal_distribution<double> drawn(0, options_.jitter);
    for (std::size_t rank = 0; rank < now_.size(); ++rank) {
      const double took = ms * factors_[rank] * (options_.jitter == 0 ? 1.0 : drawn(random_));
      now_[rank] += took;
      computed_ += took;
    }
  }

  /// Calls `function` with the time of each rank and the value of its row. A rank is (block * row size + place) * stride + offset, and a
  /// row has the same block and offset.
  template <typename Function>
  void for_each_rank(const PlannedLink& link, const Function& function, std::vector<double>& of_rows) {
    if (alike_) return function(now_[0], of_rows[0]);
    const auto stride = size(link.stride);
    const auto of_row = size(link.ranks);
    auto* now = now_.data();
    for (auto* rows = of_rows.data(); rows != of_rows.data() + of_rows.size(); rows += stride) {
      if (stride == 1) {
        for (std::size_t place = 0; place < of_row; ++place) function(*now++, *rows);
        continue;
      }
      for (std::size_t place = 0; place < of_row; ++place) {
        for (std::size_t offset = 0; offset < stride; ++offset) function(*now++, rows[offset]);
      }
    }
  }

  /// Every row begins it once all of its ranks are there and its communicator is free. Collectives in lock step need no queue of events:
  /// the latest rank of a row determines when it begins.
  void post(const PlannedAction& action) {
    const auto& link = plan_.links[action.link];
    const auto& rate = rates_[action.link];
    const double ms = rate.latency_us / 1e3 + (rate.bytes_per_s == 0 ? 0 : static_cast<double>(action.bytes) / rate.bytes_per_s * 1e3);
    if (action.queue >= free_.size()) free_.resize(action.queue + 1);
    auto& free = free_[action.queue];
    free.resize(alike_ ? 1 : now_.size() / size(link.ranks));
    for_each_rank(
        link, [&](double now, double& row) { row = std::max(row, now); }, free);
    for (auto& row : free) row += ms;
    results_.resize(action.number + 1);
    results_[action.number] = free;
  }

  void wait(const PlannedAction& action) {
    const auto& link = plan_.links[action.link];
    double exposed = 0;
    const auto wait = [&exposed](double& now, double done) {
      const double end = std::max(now, done);
      exposed += end - now;
      now = end;
    };
    for_each_rank(link, wait, results_[action.number]);
    exposed_[action.unit] += exposed;
  }

  const Plan& plan_;
  const SimulationOptions& options_;
  bool alike_;
  std::mt19937_64 random_;
  std::vector<double> now_;  // by rank
  std::vector<double> factors_;
  std::vector<UnitTime> unit_times_;
  std::vector<LinkRate> rates_;
  std::vector<std::vector<double>> free_;     // by queue and row
  std::vector<std::vector<double>> results_;  // by collective of a step and row
  double computed_ = 0;                       // of all ranks and steps
  std::vector<double> exposed_;               // the same, by unit
};

}  // namespace

double Simulation::average_ms() const { return std::accumulate(step_ms.begin(), step_ms.end(), 0.0) / static_cast<double>(step_ms.size()); }

Simulation simulate(const Plan& plan, const SimulationOptions& options) {
  check(plan, options);
  SimulatedRanks ranks(plan, options);
  Simulation simulation;
  double begin = 0;
  for (std::int64_t step = 0; step < options.steps; ++step) {
    ranks.step(step);
    simulation.step_ms.push_back(ranks.end() - begin);
    begin = ranks.end();
  }
  const double all = static_cast<double>(ranks.count() * options.steps);
  simulation.compute_ms = ranks.computed() / all;
  for (std::size_t k = 0; k < plan.units.size(); ++k) {
    const double exposed = ranks.exposed()[k] / all;
    simulation.exposed_ms += exposed;
    if (exposed > 0) simulation.exposed_by_unit_ms[plan.units[k].name] = exposed;
  }
  return simulation;
}

}  // namespace fsdp
