#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

namespace fsdp {

/// Options of clip_grad_norm().
struct ClipGradNormOptions {
  /// The p of the p-norm: positive, or infinity for the largest magnitude.
  double norm_type = 2;
  /// True throws Error if the norm is not finite, and leaves the gradients unchanged.
  bool error_if_nonfinite = false;
};

/// Scales the gradients of all parameters so that their joint p-norm is at most max_norm, and returns the norm before scaling. Powers are
/// summed in fp64, and one small exchange adds up the shards in rank order, so every strategy gets the same norm. Collective. Throws Error
/// if max_norm or norm_type is not positive.
double clip_grad_norm(torch::nn::Module& module, double max_norm, ClipGradNormOptions options = {});

/// Like clip_grad_norm(), but returns the norm as a 0-dimensional fp64 tensor on the module's device. The host does not wait, so a captured
/// step can clip. (The host waits for the norm of offloaded gradients, and with `error_if_nonfinite`. In a capture, both are an Error.)
at::Tensor clip_grad_norm_(torch::nn::Module& module, double max_norm, ClipGradNormOptions options = {});

/// The p-norm of each parameter's gradient by name, in the order of named_parameters(), the same on every rank. Parameters without a
/// gradient are left out. Collective: one exchange of 8 bytes per parameter. Throws Error if norm_type is not positive.
std::vector<std::pair<std::string, double>> gradient_norms(torch::nn::Module& module, double norm_type = 2);

/// The p-norm of each main parameter by name, in the order of named_parameters(), also of frozen ones. The norms are of complete
/// parameters, even if ranks hold tensor-parallel pieces of them, and are the same on every rank and for every strategy. Collective, as
/// gradient_norms. Throws Error if norm_type is not positive.
std::vector<std::pair<std::string, double>> parameter_norms(torch::nn::Module& module, double norm_type = 2);

}  // namespace fsdp
