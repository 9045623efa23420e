#pragma once

#include <torch/nn/module.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "fsdp/fsdp_module.h"
#include "fsdp/wait_reason.h"

namespace fsdp {

/// The waits of this rank for one kind of collective of one unit, over the steps of a report. Times are in ms per step.
struct ExposedWaits {
  std::string unit;                               ///< "(...)" if the collective belongs to no unit.
  std::string operation;                          ///< "all-gather", "reduce-scatter", ...
  bool in_backward = false;                       ///< Whether the computation was in a backward.
  double ms = 0;                                  ///< The sum of `reasons`.
  double device_ms = -1;                          ///< As StepTimes::device_exposed_ms, of these waits.
  std::array<double, kWaitReasons> reasons = {};  ///< By WaitReason.
  std::int64_t late_rank = -1;                    ///< The global rank that was waited for the longest; -1 if none was late.
  std::string late_rank_was;                      ///< What that rank did, such as "in forward of 'blocks.3'". Empty if none was late.
};

/// The time that one rank computes, as opposed to waiting, in ms per step.
struct RankTime {
  std::int64_t rank = 0;  ///< Global, as ExposedWaits::late_rank.
  double compute_ms = 0;  ///< StepTimes::compute_ms of that rank.
};

/// The times of training steps on one rank, in ms, as the host sees them: means over the steps.
struct StepTimes {
  double step_ms = 0;          ///< From the beginning of a step to that of the next one, or to the report.
  double slowest_step_ms = 0;  ///< The time of the longest step.
  double forward_ms = 0;       ///< Until backward begins. Forwards without a backward, such as an evaluation, are a part of it.
  double backward_ms = 0;      ///< Until the last reduction has ended.
  double between_ms = 0;       ///< The rest: the optimizer, loading data, saving.
  double compute_ms = 0;       ///< step_ms without the waits.
  double exposed_ms = 0;       ///< The waits for collectives.
  /// How long the device's stream waited for gathers and reductions, by the device's clock, where the host does not wait for them. -1: not
  /// measured, as on the CPU, and in steps before the program's first report.
  double device_exposed_ms = -1;
};

/// Where the time of training steps went on this rank, and how many bytes were sent.
struct StepReport {
  std::int64_t steps = 0;                         ///< The number of reported steps. If none has ended, this and all else is 0.
  StepTimes times;                                ///< All 0 without steps.
  std::array<double, kWaitReasons> reasons = {};  ///< StepTimes::exposed_ms by WaitReason.
  double overlap = 0;               ///< The share of the time from the call of collectives to their end in which this rank did not wait.
  std::vector<ExposedWaits> waits;  ///< The longest first.
  std::vector<RankTime> slowest_ranks;   ///< The ranks that compute the longest, at most three, the slowest first. The same on all ranks.
  double median_compute_ms = 0;          ///< The median of StepTimes::compute_ms over the ranks.
  std::int64_t sent_bytes = 0;           ///< The bytes that this rank sent as messages, per step.
  std::int64_t shared_memory_bytes = 0;  ///< The bytes that other ranks of this host read from its memory, per step.
  std::int64_t peak_bytes = 0;           ///< The peak of the engine's memory (MemoryStats::total) in these steps.
  std::string peak_unit;                 ///< The unit that computed at the peak; empty if none did.
};

/// One line for a log.
std::string to_line(const StepReport& report);
/// A table: the line, and the longest waits.
std::ostream& operator<<(std::ostream& stream, const StepReport& report);

/// Reports where the time of the last `steps` steps of a model went. A step begins with the first forward after a backward that reduces
/// gradients for the optimizer (under gradient accumulation, the last one). Fewer steps are reported if fewer have ended, or if their
/// events are no longer kept (some 16,000 are).
///
/// Events are always recorded; each costs well under a microsecond. On a device, the times are those of the host, which does not wait for
/// data. Only device_exposed_ms is measured on the device, from the first report of the process on (two events of the stream for each
/// collective).
///
/// Collective over the ranks of the model; call it between steps. Ranks of one host compare their clocks directly, others by the times at
/// which they exchange messages. Throws Error if the module is not sharded or `steps` is not positive; CommError.
StepReport step_report(const FSDPModule& sharded, std::int64_t steps = 1);
/// step_report() for the root, or another unit, of a sharded model.
StepReport step_report(const torch::nn::Module& module, std::int64_t steps = 1);

}  // namespace fsdp
