#include <ATen/ATen.h>

#include <map>
#include <utility>
#include <vector>

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define SIM_HAS_TORCH_GRAPHS
#endif

#include "generator.h"
#include "graph.h"
#include "host_clock.h"
#include "memory.h"
#include "streams.h"

namespace sim {

struct Graph::Recorded {
  CaptureId capture = 0;
  int device = 0;
  c10::Stream stream{c10::Stream::DEFAULT, sim::device()};
  Snapshot before;
  at::Tensor generator;  // its state before
  std::vector<std::function<void()>> nodes;
  std::vector<std::function<void()>> at_end;
  std::map<std::uintptr_t, Range> reads, writes;   // by their beginnings
  std::map<std::uintptr_t, std::uint64_t> others;  // Blocks that are not of the graph's pool: the number of their allocation.
};

namespace {

/// Under the lock: those that are being captured.
std::map<CaptureId, Graph::Recorded*>& under_way() {
  static auto* const made = new std::map<CaptureId, Graph::Recorded*>;
  return *made;
}

Graph::Recorded* recorded_on(c10::Stream stream) {
  const auto found = under_way().find(capture_of(stream));
  return found == under_way().end() ? nullptr : found->second;
}

at::Generator generator_of(int device) { return static_cast<Generator*>(default_generator(device).unsafeGetGeneratorImpl())->on_cpu(); }

}  // namespace

void note_in_graph(c10::Stream stream, std::span<const Range> ranges) {
  const Lock lock;
  auto* const recorded = recorded_on(stream);
  if (recorded == nullptr) return;
  for (const Range& range : ranges) {
    if (device_of(reinterpret_cast<const void*>(range.begin)) < 0) continue;
    auto& known = (range.write ? recorded->writes : recorded->reads)[range.begin];
    if (known.begin == 0 || known.end < range.end) known = range;
    const Allocation allocation = allocation_at(range.begin);
    if (allocation.pool != recorded->capture) recorded->others.emplace(allocation.address, allocation.number);
  }
}

void record_in_graph(c10::Stream stream, std::function<void()> node) {
  const Lock lock;
  if (auto* const recorded = recorded_on(stream)) recorded->nodes.push_back(std::move(node));
}

void record_at_end_of_graph(c10::Stream stream, std::function<void()> node) {
  const Lock lock;
  if (auto* const recorded = recorded_on(stream)) recorded->at_end.push_back(std::move(node));
}

Graph::Graph() : recorded_(std::make_unique<Recorded>()) {}
Graph::~Graph() { reset(); }

void Graph::begin_capture() {
  const Lock lock;
  TORCH_CHECK(recorded_->capture == 0, "sim: the graph was captured before");
  recorded_->device = current_device();
  recorded_->stream = current_stream(recorded_->device);
  recorded_->capture = begin_capture_on(recorded_->stream);  // or throws
  recorded_->before = snapshot(recorded_->device);
  recorded_->generator = generator_of(recorded_->device).get_state();
  under_way()[recorded_->capture] = recorded_.get();
}

void Graph::end_capture() {
  const Lock lock;
  end_capture_on(recorded_->stream);
  under_way().erase(recorded_->capture);
  restore(recorded_->device, std::exchange(recorded_->before, {}), recorded_->capture);
  generator_of(recorded_->device).set_state(recorded_->generator);
}

void Graph::replay() {
  {
    const Lock lock;
    TORCH_CHECK(recorded_->capture != 0 && under_way().count(recorded_->capture) == 0, "sim: there is no graph to replay");
    for (const auto& [address, number] : recorded_->others) {
      const Allocation now = allocation_at(address);
      if (now.address == address && now.number == number) continue;
      report("replay: the graph uses memory that was freed after its capture began");
      break;
    }
    std::vector<Range> ranges;
    for (const auto* some : {&recorded_->reads, &recorded_->writes}) {
      for (const auto& [begin, range] : *some) ranges.push_back(range);
    }
    launch(current_stream(recorded_->device), "graph", ranges);
  }
  for (const auto& node : recorded_->nodes) node();
  for (const auto& node : recorded_->at_end) node();
}

void Graph::reset() {
  const Lock lock;
  if (recorded_->capture != 0) {
    if (under_way().erase(recorded_->capture) > 0) end_capture_on(recorded_->stream);
    give_pool_back(recorded_->device, recorded_->capture);
  }
  *recorded_ = {};
}

#ifdef SIM_HAS_TORCH_GRAPHS
namespace {

/// As torch asks for one.
class TorchGraph final : public at::GraphImplInterface {
 public:
  explicit TorchGraph(const at::GraphImplArgs&) {}
  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    TORCH_CHECK(pool == c10::MempoolId_t(0, 0), "sim: each graph has a pool of its own");
    graph_.begin_capture();
  }
  void capture_end() override { graph_.end_capture(); }
  void instantiate() override {}
  void replay() override { graph_.replay(); }
  void reset() override { graph_.reset(); }
  c10::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  Graph graph_;
};

}  // namespace
#endif

}  // namespace sim

#ifdef SIM_HAS_TORCH_GRAPHS
namespace at {
using SimGraph = sim::TorchGraph;
REGISTER_GRAPH_IMPL(SIM, SimGraph)
}  // namespace at
#endif
