#pragma once

#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

namespace fsdp {

/// How clip_grad_norm() measures.
struct ClipGradNormOptions {
  /// The p of the p-norm: positive, or infinity for the largest magnitude.
  double norm_type = 2;
  /// Throws Error if the norm is not finite; the gradients are then left alone.
  bool error_if_nonfinite = false;
};

/// Scales the gradients of all parameters so that their joint p-norm is at most max_norm, and returns the norm before. Powers are summed in
/// fp64 and one small exchange adds the shards up in rank order, so every strategy gets the same norm. Collective. Throws Error if max_norm
/// or norm_type is not positive.
double clip_grad_norm(torch::nn::Module& module, double max_norm, ClipGradNormOptions options = {});

/// The p-norm of each parameter's gradient by name, in the order of named_parameters(); parameters without a gradient are left out. The
/// same on every rank. Collective, one exchange of 8 bytes per parameter. Throws Error if norm_type is not positive.
std::vector<std::pair<std::string, double>> gradient_norms(torch::nn::Module& module, double norm_type = 2);

/// The p-norm of each main parameter by name, in the order of named_parameters(), of frozen ones, too: of whole parameters, also where
/// ranks hold tensor-parallel pieces of them, and the same on every rank, for every strategy. Collective, as gradient_norms. Throws Error
/// if norm_type is not positive.
std::vector<std::pair<std::string, double>> parameter_norms(torch::nn::Module& module, double norm_type = 2);

}  // namespace fsdp
