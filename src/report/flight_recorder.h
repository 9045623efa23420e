#pragma once

#include <filesystem>
#include <vector>

#include "report/rank_now.h"

namespace fsdp::report {

/// Writes what the ranks have called into files FOLDER/rank_N in the format of c10d's flight recorder, for torch's own analyser:
/// `python -m torch.distributed.flight_recorder.fr_trace FOLDER`. It is given calls from the first one on that all ranks of a row have
/// kept. It compares the names of dtypes, and knows no units: the dtype that is written is the unit's name. Sizes are in bytes. Makes the
/// folder. Throws Error if a file can't be written.
void write_flight_recorder(const std::vector<RankNow>& ranks, const std::filesystem::path& folder);

}  // namespace fsdp::report
