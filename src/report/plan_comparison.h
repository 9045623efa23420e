#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "report/timeline.h"

// Compares a plan of a run with the run.
namespace fsdp::report {

/// The planned values of one step of a rank. Sizes are in bytes.
struct PlannedStep {
  std::int64_t ranks = 0;
  std::int64_t peak = 0;           ///< The peak of all kinds together, without the unused part of slots.
  BytesByKind peaks = {};          ///< The most of each kind.
  std::int64_t sent = 0;           ///< All that a rank sends.
  std::int64_t read_by_peers = 0;  ///< The part of it that peers read from its memory.
  std::optional<double> ms = {};   ///< How long it takes; none if the plan was made without rates.
};

/// Reads the output of `fsdp plan --json` or of Plan::json(). Throws Error, which names the option --plan, if it is not such a file.
PlannedStep read_plan(const std::filesystem::path& file);

/// One row of the comparison. A value that is not known is -1.
struct ComparedValue {
  std::string name;
  bool is_time = false;  ///< In ms; otherwise in bytes.
  double planned = 0;
  double measured = 0;
  std::int64_t rank = -1;  ///< The rank of `measured`: the one that has most. -1: none.
};

struct PlanComparison {
  std::int64_t planned_peak = 0;  ///< As PlannedStep::peak.
  std::vector<ComparedValue> values;
};

/// The plan's memory by kind, what is sent, and the time, each beside what was measured on the rank that has most. Complete steps that
/// another step follows are measured: the bytes of the last of them, and the median of their times. Throws Error if the plan is for another
/// number of ranks.
PlanComparison compare(const PlannedStep& plan, const Timeline& timeline);

}  // namespace fsdp::report
