#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace fsdp {

namespace engine {
class Engine;
struct Unit;
}  // namespace engine

/// What SummonFullParams shows, and what becomes of it.
struct SummonOptions {
  /// What is written while the parameters are whole becomes the main parameters: each rank keeps its slices of what it wrote, so all ranks
  /// must write the same. Counts as an optimizer's step does: backward through a graph from before raises torch's in-place error. False:
  /// what is written is dropped.
  bool writeback = true;
  /// Only rank 0 (of each unit's mesh) gets whole parameters; the others hold one unit at a time while they send theirs, and their
  /// parameters stay sharded. Can't be written back.
  bool rank0_only = false;
  /// False: only the module's own parameters, not its children's.
  bool recurse = true;
};

/// While it lives, the parameters of a sharded module are ordinary tensors with the whole main parameters: in main_params_dtype, whatever
/// dtype they compute in. For operators and for pointers, to read and to write, on one rank alone as well (torch::save on rank 0).
/// Afterwards they are sharded again, in their compute dtype.
///
///   {
///     const fsdp::SummonFullParams whole(*model);
///     model->embedding->weight.data_ptr<float>()[0] = 1;
///   }
///
/// Takes memory for all units that own a parameter of the module, whole, in every placement. Parameters that another guard shows stay with
/// that one. Construction is collective; destruction is not. Inside, a backward, an optimizer's step, the handle's shards and
/// fully_unshard are Errors.
class [[nodiscard]] SummonFullParams {
 public:
  /// Throws Error if the module has no sharded parameters, inside of a backward, and for rank0_only with writeback.
  explicit SummonFullParams(torch::nn::Module& module, SummonOptions options = {});
  ~SummonFullParams();
  SummonFullParams(const SummonFullParams&) = delete;
  SummonFullParams& operator=(const SummonFullParams&) = delete;

 private:
  struct Summoned {
    std::shared_ptr<engine::Engine> engine;
    engine::Unit* unit;
    std::vector<at::Tensor> whole;  ///< Per sub-buffer; empty where this rank only sends.
  };
  void dismiss() noexcept;

  const bool writeback_;
  std::vector<Summoned> summoned_;
};

}  // namespace fsdp
