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

/// The part of a checkpoint that one rank writes. Its bytes lie in the state itself, possibly on a GPU, or in a copy on the host.
struct Snapshot {
  /// A part of a tensor, as a box of it.
  struct Chunk {
    ckpt::Box box;
    at::Tensor bytes;      ///< Row-major.
    bool guarded = false;  ///< See StateItem::guarded.
  };
  struct Tensor {
    std::string key;
    ckpt::DcpPath path;
    ckpt::Dtype dtype = ckpt::Dtype::float32;
    ckpt::Shape shape;
    std::vector<Chunk> chunks;  ///< This rank's parts; empty if other ranks have all of the tensor.
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
inline constexpr const char* kRankExtra = "rank_extra";  ///< Below it come the numbers of the ranks.
inline constexpr const char* kScaler = "scaler";
inline constexpr const char* kOwn =
    "fsdp";  ///< The items that this library adds: kLrFactor and the names after it, and SavedGenerator::key.
inline constexpr const char* kLrFactor = "fsdp.lr_factor";              ///< The factor of the parameters that no group matches.
inline constexpr const char* kBaseLr = "fsdp.base_lr.";                 ///< Below it come the positions of groups in "optim.param_groups".
inline constexpr const char* kGroupLrFactor = "fsdp.group_lr_factor.";  ///< Below it come the same positions.
inline constexpr const char* kMetric = "fsdp.metric";
inline constexpr const char* kRanks = "fsdp.ranks";  ///< The number of ranks that saved.

/// An item's name: its path, joined by dots.
std::string key_of(const ckpt::DcpPath& path);

/// A random generator of this process that a checkpoint keeps.
struct SavedGenerator {
  std::string name;  ///< "rng" for the CPU's, "cuda_rng" for a GPU's.
  at::Generator generator;

  /// Returns the name of the item with the state of rank `rank`.
  std::string key(std::int64_t rank) const;
  at::Tensor state();
  /// True for a state that set_state() accepts.
  bool takes(const at::Tensor& state);
  void set_state(const at::Tensor& state);
};
/// Returns the generators for a model on this device, the CPU's first.
std::vector<SavedGenerator> generators_of(c10::Device device);

/// Converts the state of a GradScaler to values with torch's names.
std::vector<std::pair<std::string, ckpt::PythonValue>> values_of(const GradScalerState& state);

/// Host memory for the bytes of a snapshot, which is reused from save to save. A snapshot is copied in two steps. Data that may be written
/// at any time are copied at once. The rest, which is the largest part, is copied beside training.
class HostBuffer {
 public:
  explicit HostBuffer(c10::Device device) : device_(device) {}

  /// Makes room, points `snapshot` to this memory, and copies the chunks that are not guarded.
  void begin(Snapshot& snapshot);
  /// Copies the rest, once `device`'s stream has done what it held at begin(). Another thread may call this.
  void finish();

 private:
  struct Copy {
    at::Tensor from, to;
  };

  c10::Device device_;
  at::Tensor memory_;
  std::vector<Copy> copies_;  // the copies that finish() makes
  std::optional<c10::Event>
      ready_;  // An event after which all data to be copied are computed, offloaded state in host memory included. The CPU has none.
};

/// Takes a snapshot of this rank's part. `optimizer` may be null.
Snapshot take_snapshot(torch::nn::Module& module, Optimizer* optimizer, const ExtraState& extra, const SaveOptions& options,
                       const CheckpointRanks& ranks);

/// Throws Error for two items of one name, and for a name or a text that is not UTF-8, which Python could not read.
void check_names(const Snapshot& snapshot);

/// Returns the size of the snapshot's values in bytes.
std::int64_t bytes_of(const Snapshot& snapshot);

/// Writes the parts of all ranks as one checkpoint. `saved`: rank 0's is the least number for Sidecar::saved; 0: the time. Collective.
/// Throws Error on every rank if it fails on one.
void write_checkpoint(const std::string& path, const Snapshot& snapshot, const SaveOptions& options, const CheckpointRanks& ranks,
                      Phases& phases, std::int64_t saved = 0);

}  // namespace fsdp::state
