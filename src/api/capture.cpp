#include "fsdp/capture.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <utility>
#include <vector>

#include "base/device_graph.h"
#include "base/order_streams.h"
#include "base/replays.h"
#include "comm/mesh/ranks.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"

namespace fsdp {

struct CapturedStep::State {
  std::function<void()> step;  // what it holds, the graph uses
  std::shared_ptr<engine::Engine> engine;
  std::vector<BesideReplay> beside;
  std::unique_ptr<DeviceGraph> graph;
};

namespace {

void check(const engine::Engine& engine, const CaptureOptions& options) {
  if (options.warm_up < 1) {
    throw Error("capture: warm_up is " + std::to_string(options.warm_up) + "; at least one step has to run before one is captured");
  }
  for (const auto& unit : engine.units()) {
    if (unit->options.offload == Offload::kNone) continue;
    throw Error("capture: unit '" + unit->name + "' is offloaded, and the host waits for what it copies; shard the model without offload");
  }
}

/// Ends the capture of a step that has failed: what it has recorded was never computed. The reported error is the failure, not the device's
/// error about the early end.
void abandon(DeviceGraph& graph, engine::Engine& engine) {
  try {
    graph.end_capture();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
  engine.reset();
  engine.main().zero_grad();
}

}  // namespace

CapturedStep::CapturedStep(std::unique_ptr<State> state) : state_(std::move(state)) {}
CapturedStep::CapturedStep(CapturedStep&&) noexcept = default;
CapturedStep& CapturedStep::operator=(CapturedStep&&) noexcept = default;
CapturedStep::~CapturedStep() = default;

CapturedStep capture(torch::nn::Module& module, std::function<void()> step, CaptureOptions options) {
  auto state = std::make_unique<CapturedStep::State>();
  state->engine = handle(module).engine();
  engine::Engine& engine = *state->engine;
  const c10::Device device = engine.options().device();
  state->graph = make_device_graph(device.type());
  if (!state->graph) {
    throw Error("capture: this build knows no graphs of '" + c10::DeviceTypeName(device.type(), /*lower_case=*/true) +
                "' devices; train without capture, or for CUDA build with FSDP_CUDA=ON");
  }
  state->step = std::move(step);
  const comm::Ranks ranks(engine.options().mesh);
  ranks.compare("warm_up " + std::to_string(options.warm_up), {.operation = "capture", .unit = "(all)"});
  check(engine, options);
  const c10::impl::VirtualGuardImpl implementation(device.type());
  const c10::DeviceGuard on_device(device);
  const c10::Stream before = implementation.getStream(device);
  const c10::Stream stream = implementation.getStreamFromGlobalPool(device);
  order_streams(before, stream);
  {
    const c10::StreamGuard on_stream(stream);
    for (int i = 0; i < options.warm_up; ++i) state->step();
    engine.main().finish_gradient_sync();
    // Beyond this, the headers of all that ranks have done have been compared, and all ranks capture.
    ranks.compare("the same", {.operation = "capture after its warm-up", .unit = "(all)"});
    engine.main().changed(/*forward_begins=*/true);    // What is gathered already, the graph would not gather.
    implementation.synchronizeDevice(device.index());  // A graph waits for nothing that it has not recorded.
    state->graph->begin_capture();
    try {
      const ReplayList list(state->beside);
      state->step();
      engine.main().finish_gradient_sync();
    } catch (...) {
      abandon(*state->graph, engine);
      throw;
    }
    state->graph->end_capture();
  }
  order_streams(stream, before);
  return CapturedStep(std::move(state));
}

void CapturedStep::replay() {
  for (const auto& actions : state_->beside) actions.before();
  state_->engine->main().flush_writes();
  state_->graph->replay();
  for (const auto& actions : state_->beside) actions.after();
  state_->engine->main().changed();
}

}  // namespace fsdp
