#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <memory>

namespace fsdp {

/// What deferred_init() records.
struct DeferredInitOptions {
  /// False draws no random numbers, here or later: for models whose values come from elsewhere (InitialValues::kZero before a checkpoint
  /// is loaded, InitialValues::kFromRank0 on the other ranks). The generators stay where they are.
  bool draw = true;
};

namespace detail {

/// From construction to destruction, the operators of this thread are recorded.
class Recording {
 public:
  explicit Recording(DeferredInitOptions options);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace detail

/// Builds a model without memory: `auto model = fsdp::deferred_init([&] { return Model(config); })`. Returns what `make` returns, any
/// holder of any torch::nn module. Its parameters and buffers are on the meta device; the operators that `make` calls are recorded instead
/// of computed. fully_shard then computes the parameters one after the other and keeps this rank's shards: the same bits as if the model
/// had been built whole, with memory for the shards and little more than the largest parameter. fsdp::materialize makes them whole.
///
/// - Random numbers are the ones of now: the generators are left as an ordinary constructor leaves them.
/// - Tensors from outside (from_blob, files, other models) can be used and copied in; they are copied when an operator takes them together
///   with what has no memory. What `make` computes from such tensors alone is computed at once.
/// - What asks for a value (item(), or a shape that depends on values) gets it: it is computed for the moment. What asks for an address
///   gets an error, but for tables filled by a pointer right after torch::empty or torch::zeros, as torch::tensor does.
/// - Operators on the result are recorded as well (model->to(torch::kBFloat16), initialisation by hand), up to fully_shard or materialize.
///   Computing with it and tensors that have memory (a forward) is an Error.
///
/// Models are built on the CPU; fully_shard brings the shards to the mesh's device. Throws Error for operators on other devices and for
/// results that are not dense.
template <typename Make>
auto deferred_init(const Make& make, DeferredInitOptions options = {}) {
  const detail::Recording recording(options);
  return make();
}

/// Gives all parameters and buffers of `module` that deferred_init made their values and memory, in place: the module is as if
/// built whole. Others are left alone.
void materialize(torch::nn::Module& module, c10::Device device = c10::kCPU);

/// True if deferred_init made the tensor, and neither fully_shard nor materialize has given it memory.
bool is_deferred(const at::Tensor& tensor);

}  // namespace fsdp
