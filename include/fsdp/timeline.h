#pragma once

#include <filesystem>

#include "fsdp/device_mesh.h"

namespace fsdp {

/// From now on, this process keeps its events, including the present ones, in FOLDER/rank-N.events, where N is its global rank. (The
/// environment variable FSDP_EVENTS does this from the first mesh on.) The last 16,384 are kept, in 2 MB. The commands `fsdp timeline` and
/// `fsdp why`, and write_timeline(), may read the file at any time, also after the process has died.
///
/// Creates the folder if it does not exist. Not collective: call it on each rank. Throws Error if the file can't be created.
void keep_events(const std::filesystem::path& folder, const DeviceMesh& mesh);

/// Writes a timeline of all ranks from the events in such a folder, with the reason of each wait, and the rank that caused it. If the name
/// of the file ends in ".json", it is Perfetto's JSON (https://ui.perfetto.dev); otherwise it is an HTML page that loads nothing else. A
/// regular file is complete or absent. Links are followed, and devices and FIFOs are written in place.
///
/// Call it on one rank, or in any other program; the ranks may continue meanwhile. Call mesh.barrier() before, so that the events of all
/// ranks reach the same point. Throws Error if there are no events, or if the file can't be written.
void write_timeline(const std::filesystem::path& folder, const std::filesystem::path& file);

}  // namespace fsdp
