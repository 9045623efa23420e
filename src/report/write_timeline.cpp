#include <exception>
#include <string>
#include <vector>

#include "events/event_ring.h"
#include "fsdp/error.h"
#include "fsdp/timeline.h"
#include "report/timeline_files.h"
#include "report/timeline_page.h"
#include "report/trace_json.h"

namespace fsdp {

void keep_events(const std::filesystem::path& folder, const DeviceMesh& mesh) {
  try {
    events::keep_in_file(folder, mesh.rank(), mesh.size());
  } catch (const std::exception& error) {
    throw Error("keep_events: rank " + std::to_string(mesh.rank()) + ": " + error.what());
  }
}

void write_timeline(const std::filesystem::path& folder, const std::filesystem::path& file) {
  std::vector<std::string> unreadable;
  const auto timeline = report::read_timeline(folder, {}, unreadable);
  report::write_whole(
      file, file.extension() == ".json" ? report::trace_json(timeline) : report::timeline_page(timeline, report::title_of(folder)));
}

}  // namespace fsdp
