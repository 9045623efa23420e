#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "report/timeline.h"

// A plan of a run beside what the run did.
namespace fsdp::report {

/// What a plan says of one step of a rank. Sizes are in bytes.
struct PlannedStep {
  std::int64_t ranks = 0;
  std::int64_t peak = 0;           ///< The most of all kinds together, without what slots have beyond what is lent.
  BytesByKind peaks = {};          ///< The most of each kind.
  std::int64_t sent = 0;           ///< All that a rank sends.
  std::int64_t read_by_peers = 0;  ///< The part of it that peers read from its memory.
  std::optional<double> ms = {};   ///< How long it takes; none if the plan was made without rates.
};

/// Reads what `fsdp plan --json` has printed, or Plan::json() returned. Throws Error, which names the option --plan, if it is no such file.
PlannedStep read_plan(const std::filesystem::path& file);

/// One row of the comparison. A value that is not known is -1.
struct ComparedValue {
  std::string name;
  bool is_time = false;  ///< In ms; otherwise in bytes.
  double planned = 0;
  double measured = 0;
  std::int64_t rank = -1;  ///< Of which rank `measured` is: the one that has most. -1: of none.
};

struct PlanComparison {
  std::int64_t planned_peak = 0;  ///< As PlannedStep::peak.
  std::vector<ComparedValue> values;
};

/// The plan's memory by kind, what is sent, and the time, each beside what was measured on the rank that has most. Measured are the steps
/// that are whole and that another one follows: bytes in the last of them, and the time of the one in the middle by time. Throws Error if
/// the plan is for another number of ranks.
PlanComparison compare(const PlannedStep& plan, const Timeline& timeline);

}  // namespace fsdp::report
