#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "engine/engine.h"
#include "replay/comparison.h"
#include "replay/microbatch_record.h"
#include "replay/microbatch_state.h"

namespace fsdp::replay {

/// Checks single microbatches of a model, for fsdp::ReplayCheck and libfsdp.ReplayCheck.
class Checker {
 public:
  /// Runs forward and backward of the microbatch that these bytes (1-D, on the CPU) describe.
  using Microbatch = std::function<void(const at::Tensor& batch)>;
  /// The model's buffers, in the same order on all ranks.
  using Buffers = std::function<std::vector<at::Tensor>()>;

  Checker(std::shared_ptr<engine::Engine> engine, Buffers buffers) : engine_(std::move(engine)), buffers_(std::move(buffers)) {}

  /// Runs this rank's microbatch, repeats that of its neighbour, and compares. Collective. Throws Error on all ranks if data differ. An
  /// exception of `run` has the same effect on the engine as one in training.
  void check(const Microbatch& run, const at::Tensor& batch);
  /// Takes digests of this rank's main parameters, which the next check() compares with the main parameters.
  void remember_parameters();

 private:
  std::vector<std::int64_t> main_digests() const;
  std::vector<std::int64_t> as_gathered(const engine::Unit& unit) const;
  std::vector<MainTestimony> look_at_main() const;
  comm::Communicator& row() const;
  /// A microbatch of this rank.
  struct OwnMicrobatch {
    MicrobatchState before;
    at::Tensor message;  ///< The data that other ranks need to repeat it.
  };

  at::Tensor message(const at::Tensor& batch, MicrobatchState before) const;
  Repetition repeat(const Microbatch& run, const OwnMicrobatch& own, int shift, MicrobatchRecord& record) const;
  std::vector<RankComparison> compare(const Testimony& testimony) const;

  std::shared_ptr<engine::Engine> engine_;
  Buffers buffers_;
  std::vector<std::int64_t> remembered_;  ///< By unit; empty: nothing was remembered since the last check.
};

}  // namespace fsdp::replay
