#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <vector>

#include "checkpoint/output_file.h"
#include "comm/mesh/device_mesh_state.h"
#include "events/event_ring.h"
#include "fsdp/error.h"
#include "fsdp/timeline.h"
#include "report/timeline_files.h"
#include "report/timeline_page.h"
#include "report/trace_json.h"

namespace fsdp {

void keep_events(const std::filesystem::path& folder, const DeviceMesh& mesh) {
  try {
    events::keep_in_file(folder, mesh.rank(), mesh.state()->world_size);  // The mesh may be a part of a larger one.
  } catch (const std::exception& error) {
    throw Error("keep_events: rank " + std::to_string(mesh.rank()) + ": " + error.what());
  }
}

void write_timeline(const std::filesystem::path& folder, const std::filesystem::path& file) {
  std::vector<std::string> left_out;
  const auto timeline = report::read_timeline(folder, {}, left_out);
  for (const auto& line : left_out) TORCH_WARN("write_timeline: not read: ", line);
  ckpt::write_output(
      file, file.extension() == ".json" ? report::trace_json(timeline) : report::timeline_page(timeline, report::title_of(folder)));
}

}  // namespace fsdp
