#include "base/device_graph.h"

#include <utility>
#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define FSDP_HAS_TORCH_GRAPHS
#endif
#ifdef USE_C10D_NCCL
#include <ATen/cuda/CUDAGraph.h>
#endif

namespace fsdp {
namespace {

#ifdef FSDP_HAS_TORCH_GRAPHS
class TorchGraph final : public DeviceGraph {
 public:
  explicit TorchGraph(std::unique_ptr<at::GraphImplInterface> graph) : graph_(std::move(graph)) {}
  void begin_capture() override { graph_->capture_begin(); }
  void end_capture() override { graph_->capture_end(); }
  void replay() override { graph_->replay(); }

 private:
  const std::unique_ptr<at::GraphImplInterface> graph_;
};
#endif

#ifdef USE_C10D_NCCL
class CudaGraph final : public DeviceGraph {
 public:
  void begin_capture() override { graph_.capture_begin(); }
  void end_capture() override { graph_.capture_end(); }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};
#endif

}  // namespace

std::unique_ptr<DeviceGraph> make_device_graph(c10::DeviceType type) {
#ifdef USE_C10D_NCCL
  if (type == c10::DeviceType::CUDA) return std::make_unique<CudaGraph>();
#endif
#ifdef FSDP_HAS_TORCH_GRAPHS
  if (at::has_graph_impl(type)) return std::make_unique<TorchGraph>(at::create_graph_impl(type));
#endif
  return nullptr;
}

}  // namespace fsdp
