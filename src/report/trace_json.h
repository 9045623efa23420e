#pragma once

#include <string>

#include "report/timeline.h"

namespace fsdp::report {

/// The timeline in the JSON of Chrome's traces, which Perfetto reads (https://ui.perfetto.dev): a process per rank, a thread per lane,
/// times in microseconds from the timeline's beginning. Collectives have the names that torch.profiler shows ("FSDP::all_gather
/// (blocks.3)").
std::string trace_json(const Timeline& timeline);

}  // namespace fsdp::report
