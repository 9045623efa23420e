#pragma once

#include <filesystem>

#include "fsdp/device_mesh.h"

namespace fsdp {

/// From now on, this process keeps its events in FOLDER/rank-N.events, where N is its global rank, with those that it has now; as the
/// environment variable FSDP_EVENTS makes it do from its first mesh on. The last 16,384 are kept, in 2 MB. Others may read the file at
/// any time, also when the process has died: the commands `fsdp timeline` and `fsdp why`, and write_timeline().
///
/// Makes the folder if it is not there. Not collective: call it on each rank. Throws Error if the file can't be made.
void keep_events(const std::filesystem::path& folder, const DeviceMesh& mesh);

/// Writes what the ranks did, beside each other, from the events in such a folder: why each of them waited, and for whom. A file whose name
/// ends in ".json" gets Perfetto's JSON (https://ui.perfetto.dev); any other one is a page of HTML that needs nothing else. A regular
/// file is complete or not there. Links are followed, and devices and FIFOs are written in place.
///
/// For one rank, or any other program; the ranks may go on meanwhile. Call mesh.barrier() before, so that all ranks have come as far.
/// Throws Error if there are no events, or if the file can't be written.
void write_timeline(const std::filesystem::path& folder, const std::filesystem::path& file);

}  // namespace fsdp
