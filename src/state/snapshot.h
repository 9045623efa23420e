#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dcp_metadata.h"
#include "checkpoint/python_value.h"
#include "fsdp/save_load.h"
#include "state/ranks.h"

namespace fsdp::state {

/// What one rank writes of a checkpoint. Bytes lie in the state itself, or in a copy on the host.
struct Snapshot {
  /// A part of a tensor, as a box of it.
  struct Chunk {
    ckpt::Box box;
    const char* data = nullptr;  ///< Row-major.
  };
  struct Tensor {
    std::string key;
    ckpt::DcpPath path;
    ckpt::Dtype dtype = ckpt::Dtype::float32;
    ckpt::Shape shape;
    std::vector<Chunk> chunks;  ///< Empty where other ranks have it all.
  };
  struct Object {
    std::string key;
    ckpt::DcpPath path;
    ckpt::PythonValue value;
  };
  std::vector<Tensor> tensors;
  std::vector<Object> objects;
  std::vector<at::Tensor> kept;  ///< Keeps what `data` points to alive.
};

/// Names in every checkpoint of this library, beside "model" and "optim".
inline constexpr const char* kModel = "model";
inline constexpr const char* kOptimizer = "optim";
inline constexpr const char* kExtra = "extra";
inline constexpr const char* kOwn = "fsdp";  ///< What this library adds of its own: see kLrFactor, rng_key.
inline constexpr const char* kLrFactor = "fsdp.lr_factor";
std::string rng_key(std::int64_t rank);

/// Host memory of several tensors, used again from save to save.
class HostBuffer {
 public:
  /// Copies `snapshot`'s data here, and points it here.
  void take(Snapshot& snapshot);

 private:
  at::Tensor memory_;
};

/// This rank's part. `optimizer` may be null. Tensors on a GPU are copied to the host.
Snapshot take_snapshot(torch::nn::Module& module, Optimizer* optimizer, const ExtraState& extra, const SaveOptions& options,
                       const Ranks& ranks);

/// Writes the parts of all ranks as one checkpoint. Collective. Throws Error on every rank if it fails on one.
void write_checkpoint(const std::string& path, const Snapshot& snapshot, const SaveOptions& options, const Ranks& ranks);

}  // namespace fsdp::state
