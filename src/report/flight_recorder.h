#pragma once

#include <filesystem>
#include <vector>

#include "report/rank_now.h"

namespace fsdp::report {

/// Writes the calls of the ranks into files FOLDER/rank_N in the format of c10d's flight recorder, for torch's own analyser:
/// `python -m torch.distributed.flight_recorder.fr_trace FOLDER`. The files begin with the first call that all ranks of a row have kept.
/// The analyser compares the names of dtypes, and has no units, so the unit's name is written as the dtype. Sizes are in bytes. Makes the
/// folder. Throws Error if a file can't be written.
void write_flight_recorder(const std::vector<RankNow>& ranks, const std::filesystem::path& folder);

}  // namespace fsdp::report
