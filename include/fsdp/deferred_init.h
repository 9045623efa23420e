#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <memory>

namespace fsdp {

/// Options of deferred_init().
struct DeferredInitOptions {
  /// False draws no random numbers, now or later, and leaves the generators as they are. Use it for models whose values come from elsewhere
  /// (InitialValues::kZero before a checkpoint is loaded, InitialValues::kFromRank0 on the other ranks).
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

/// Builds a model without allocating memory: `auto model = fsdp::deferred_init([&] { return Model(config); })`. Returns the result of
/// `make`, which is any holder of any torch::nn module. Its parameters and buffers are on the meta device, and the operators that `make`
/// calls are recorded instead of computed. fully_shard then computes the parameters one after the other and keeps this rank's shards. They
/// have the same bits as in a model that was built in the ordinary way. This takes memory for the shards and little more than the largest
/// parameter. fsdp::materialize computes unsharded parameters instead.
///
/// - Random numbers are drawn now, so the generators are left as an ordinary constructor leaves them.
/// - Tensors from outside (from_blob, files, other models) can be used and copied in. They are copied if an operator takes them together
///   with deferred tensors. Operators on such tensors alone are computed at once.
/// - A call that needs a value (item(), or a shape that depends on values) gets it. A call that needs an address throws an error, except
///   for tables that are filled by a pointer right after torch::empty or torch::zeros, as torch::tensor does.
/// - Operators on the result are recorded as well (model->to(torch::kBFloat16), initialisation by hand), until fully_shard or materialize.
///   An operator on the result and tensors that have memory (a forward) is an Error.
///
/// Models are built on the CPU, and fully_shard brings the shards to the mesh's device. Throws Error for operators on other devices and for
/// results that are not dense.
template <typename Make>
auto deferred_init(const Make& make, DeferredInitOptions options = {}) {
  const detail::Recording recording(options);
  return make();
}

/// Computes all deferred parameters and buffers of `module`, in place. The module is then the same as without deferred_init. Other
/// parameters and buffers do not change.
void materialize(torch::nn::Module& module, c10::Device device = c10::kCPU);

/// True if the tensor is deferred: deferred_init made it, and neither fully_shard nor materialize has computed it.
bool is_deferred(const at::Tensor& tensor);

}  // namespace fsdp
