#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace fsdp {

/// Finds silent data corruption: bits that have flipped in parameters, in gradients, or in messages, and ranks that compute wrongly. Every
/// `every`-th microbatch is checked: each rank computes the microbatch of its neighbour once more, and the ranks compare digests of their
/// data, per unit.
///
///     fsdp::ReplayCheck check(*model, 100);
///     check.run([&](const std::vector<at::Tensor>& batch) { loss_of(model, batch).backward(); }, {input, target});
///     optimizer.step();
///     check.remember_parameters();
///
/// The computation must be deterministic: the same batch, parameters, buffers and states of torch's generators give the same bits on each
/// rank. Ranks need the same hardware, and the same number of threads.
class ReplayCheck {
 public:
  /// Forward and backward of one microbatch, and nothing else: no step of an optimizer, no zero_grad().
  using Microbatch = std::function<void(const std::vector<at::Tensor>& batch)>;

  /// `module` must outlive this object. Throws Error if it is not sharded, or if `every` is not positive.
  ReplayCheck(const torch::nn::Module& module, std::int64_t every);
  ~ReplayCheck();
  ReplayCheck(const ReplayCheck&) = delete;
  ReplayCheck& operator=(const ReplayCheck&) = delete;

  /// Runs `microbatch` on `batch`. In a check, runs it on a copy of `batch`, and then on the batch of another rank, and drops the gradients
  /// of the latter. Afterwards gradients, buffers and generators are the same as after this rank's microbatch alone.
  ///
  /// Call it on all ranks, between steps. Collective if it checks. Throws Error on every rank if data differ: the message names the unit,
  /// the data that differ, the ranks, and, if this can be decided, the rank that is right. Gradients are then those of the microbatch, and
  /// may be wrong; buffers and generators are as before.
  void run(const Microbatch& microbatch, const std::vector<at::Tensor>& batch);

  /// Call it after an update, if nothing else writes the parameters before the next run(). If the next run() checks, it compares the memory
  /// of the main parameters with that of now. Otherwise this has no effect.
  void remember_parameters();

  /// The number of microbatches that have been checked.
  std::int64_t checked() const { return checked_; }

 private:
  struct Parts;
  bool is_due() const { return (runs_ + 1) % every_ == 0; }

  std::unique_ptr<Parts> parts_;
  std::int64_t every_;
  std::int64_t runs_ = 0;
  std::int64_t checked_ = 0;
};

}  // namespace fsdp
