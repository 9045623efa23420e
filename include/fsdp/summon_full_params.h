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

/// Options of SummonFullParams.
struct SummonOptions {
  /// True writes changes back to the main parameters. Each rank keeps its shards of the values that it wrote, so all ranks must write the
  /// same. Like an optimizer's step, this makes backward through an older graph raise torch's in-place error. False drops changes.
  bool writeback = true;
  /// True exposes the full parameters on rank 0 (of each unit's mesh) only. The other ranks send their shards, with memory for one unit at
  /// a time, and their parameters stay sharded. Changes can't be written back.
  bool rank0_only = false;
  /// Whether to include the parameters of the module's children.
  bool recurse = true;
};

/// A guard that temporarily exposes the full parameters of a sharded module. During its lifetime, the parameters are ordinary tensors with
/// the unsharded main parameters, in main_params_dtype. They can be read and written, by operators and by pointers, also on one rank alone
/// (torch::save on rank 0). torch::load and other functions that replace a parameter's memory count as writes. Afterwards the parameters
/// are sharded again, in their compute dtype.
///
/// {
///     const fsdp::SummonFullParams whole(*model);
///     model->embedding->weight.data_ptr<float>()[0] = 1;
/// }
///
/// It takes memory for the unsharded parameters of all units that own a parameter of the module, in every placement. Parameters that
/// another guard exposes already stay with that one. Construction is collective; destruction is not. During the guard's lifetime, a
/// backward, an optimizer's step, the handle's shards and fully_unshard throw Error.
class [[nodiscard]] SummonFullParams {
 public:
  /// Throws Error if the module has no sharded parameters, if it is called inside of a backward, and for rank0_only with writeback.
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
