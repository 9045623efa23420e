#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace fsdp {

/// Finds data that a machine has corrupted without saying so: bits that have flipped in parameters, in gradients, or in messages, and ranks
/// that compute wrongly. Every `every`-th microbatch is checked: each rank computes the microbatch of its neighbour once more, and the
/// ranks compare digests of what they have seen, per unit.
///
///     fsdp::ReplayCheck check(*model, 100);
///     check.run([&](const std::vector<at::Tensor>& batch) { loss_of(model, batch).backward(); }, {input, target});
///     optimizer.step();
///     check.remember_parameters();
///
/// The computation must be deterministic: the same batch, parameters, buffers and states of torch's generators give the same bits on each
/// rank. Ranks have the same hardware, and as many threads.
class ReplayCheck {
 public:
  /// Forward and backward of one microbatch, and nothing else: no step of an optimizer, no zero_grad().
  using Microbatch = std::function<void(const std::vector<at::Tensor>& batch)>;

  /// `module` is sharded, and must live longer. Throws Error if it is not, or if `every` is not positive.
  ReplayCheck(const torch::nn::Module& module, std::int64_t every);
  ~ReplayCheck();
  ReplayCheck(const ReplayCheck&) = delete;
  ReplayCheck& operator=(const ReplayCheck&) = delete;

  /// Runs `microbatch` on `batch`. If it is to be checked, runs it on a copy of `batch`, and then on that of another rank, whose gradients
  /// are dropped. Afterwards gradients, buffers and generators are as after this rank's microbatch alone.
  ///
  /// Call it on all ranks alike, between steps. Collective if it checks. Throws Error on every rank if data differ: the message names the
  /// unit, what has changed, the ranks, and who is right, if this can be decided. Gradients are those of the microbatch then, and not to be
  /// trusted; buffers and generators are as before.
  void run(const Microbatch& microbatch, const std::vector<at::Tensor>& batch);

  /// Call it after an update, when nothing else will write the parameters before the next run(). If that one checks, it finds out whether
  /// the memory of the main parameters has changed in between. Otherwise this does nothing.
  void remember_parameters();

  /// How many microbatches have been checked.
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
