#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dcp_metadata.h"
#include "checkpoint/python_value.h"
#include "fsdp/save_load.h"
#include "state/phases.h"
#include "state/ranks.h"

namespace fsdp::state {

/// What one rank writes of a checkpoint. Bytes lie in the state itself, perhaps on a GPU, or in a copy on the host.
struct Snapshot {
  /// A part of a tensor, as a box of it.
  struct Chunk {
    ckpt::Box box;
    at::Tensor bytes;      ///< Row-major.
    bool guarded = false;  ///< See StateItem.
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
};

/// Names in every checkpoint of this library, beside "model" and "optim".
inline constexpr const char* kModel = "model";
inline constexpr const char* kOptimizer = "optim";
inline constexpr const char* kExtra = "extra";
inline constexpr const char* kRankExtra = "rank_extra";  ///< Below it, each rank's number.
inline constexpr const char* kScaler = "scaler";
inline constexpr const char* kOwn = "fsdp";  ///< What this library adds of its own: kLrFactor and those below it, and SavedGenerator::key.
inline constexpr const char* kLrFactor = "fsdp.lr_factor";              ///< Of the parameters that no group matches.
inline constexpr const char* kBaseLr = "fsdp.base_lr.";                 ///< Below it, the numbers of "optim.param_groups".
inline constexpr const char* kGroupLrFactor = "fsdp.group_lr_factor.";  ///< The same.
inline constexpr const char* kMetric = "fsdp.metric";
inline constexpr const char* kRanks = "fsdp.ranks";  ///< How many saved.

/// An item's name: its path, joined by dots.
std::string key_of(const ckpt::DcpPath& path);

/// A random generator of this process that a checkpoint keeps.
struct SavedGenerator {
  std::string name;  ///< "rng" for the CPU's, "cuda_rng" for a GPU's.
  at::Generator generator;

  /// Where rank `rank`'s state is.
  std::string key(std::int64_t rank) const;
  at::Tensor state();
  /// True for what set_state() will take.
  bool takes(const at::Tensor& state);
  void set_state(const at::Tensor& state);
};
/// The CPU's first.
std::vector<SavedGenerator> generators_of(c10::Device device);

/// A GradScaler's state by torch's names, and back. Throws Error if one is missing, or has no meaning.
std::vector<std::pair<std::string, ckpt::PythonValue>> values_of(const GradScalerState& state);
GradScalerState grad_scaler_state(const std::function<ckpt::PythonValue(const std::string& name)>& value);

/// Host memory that takes a snapshot's bytes, used again from save to save. A snapshot is copied in two steps: what may be written at any
/// time at once, the rest, which is most of it, beside training.
class HostBuffer {
 public:
  explicit HostBuffer(c10::Device device) : device_(device) {}

  /// Makes room, points `snapshot` here, and copies what is not guarded.
  void begin(Snapshot& snapshot);
  /// Copies the rest, once `device`'s stream has done what it held at begin(). Another thread may call this.
  void finish();

 private:
  struct Copy {
    at::Tensor from, to;
  };

  c10::Device device_;
  at::Tensor memory_;
  std::vector<Copy> copies_;         // those that finish() makes
  std::optional<c10::Event> ready_;  // What is copied, offloaded state on the host too, was computed before it. The CPU has none.
};

/// This rank's part. `optimizer` may be null.
Snapshot take_snapshot(torch::nn::Module& module, Optimizer* optimizer, const ExtraState& extra, const SaveOptions& options,
                       const Ranks& ranks);

/// Bytes of its values.
std::int64_t bytes_of(const Snapshot& snapshot);

/// Writes the parts of all ranks as one checkpoint. Collective. Throws Error on every rank if it fails on one.
void write_checkpoint(const std::string& path, const Snapshot& snapshot, const SaveOptions& options, const Ranks& ranks, Phases& phases);

}  // namespace fsdp::state
