#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/granularity.h"
#include "fsdp/optim.h"

namespace fsdp {

/// How Muon fits the size of an update to the shape of its matrix.
enum class AdjustLR : std::uint8_t {
  kOriginal,       ///< lr * sqrt(max(1, rows / columns)): as Keller Jordan's.
  kMatchRMSAdamW,  ///< lr * 0.2 * sqrt(max(rows, columns)): updates as large as AdamW's, so AdamW's lr and weight decay fit (Moonshot).
};

/// Of the matrices, and of AdamW for everything else.
struct MuonOptions {
  double lr = 0.02;                                                   ///< Learning rate, before `adjust_lr`.
  double weight_decay = 0;                                            ///< Times the learning rate.
  double momentum = 0.95;                                             ///< Of the gradients of the steps before.
  bool nesterov = true;                                               ///< Nesterov's form of momentum.
  AdjustLR adjust_lr = AdjustLR::kOriginal;                           ///< What a matrix's shape does to the learning rate.
  int ns_steps = 5;                                                   ///< Newton-Schulz iterations.
  std::array<double, 3> ns_coefficients = {3.4445, -4.7750, 2.0315};  ///< Of x, x^3 and x^5.
  double eps = 1e-7;                                                  ///< The least norm that an update is divided by.
  /// In which the iterations run. By default bfloat16, whose accuracy is enough; on the CPU float32, since few processors multiply bfloat16
  /// as fast, and others take five times as long for it.
  std::optional<at::ScalarType> ns_dtype = std::nullopt;
  /// Which parameters, by name, Muon updates, among those of two dimensions or more; by default those that are laid out whole
  /// (whole_matrices). It is meant for hidden layers: leave embeddings and the output layer to AdamW.
  std::function<bool(const std::string& name)> matrices = {};
  /// For all other parameters.
  AdamWOptions adamw = {};
};

/// Muon (Jordan, 2024): momentum whose matrix is made orthogonal before it is applied, for the matrices of hidden layers, with decoupled
/// weight decay; AdamW for everything else. Each matrix needs to be on one rank as a whole, which updates it, and keeps its momentum,
/// alone:
///
///     const auto hidden = [](const std::string& name) { return name.starts_with("blocks."); };
///     fsdp::fully_shard(*model, {.units = ..., .granularity = fsdp::whole_matrices(hidden)});
///     fsdp::Muon optimizer(*model, {.lr = 0.02, .adamw = {.lr = 3e-4}});
///
/// A parameter of more than two dimensions is a matrix of size(0) rows. The same bits for every strategy and number of ranks, given the
/// same gradients. lr() is that of the matrices; a ParamGroup's settings apply to whichever algorithm updates its parameters.
class Muon : public Optimizer {
 public:
  /// Throws Error if an option is out of range, or if a parameter that `matrices` accepts is cut over several ranks.
  Muon(torch::nn::Module& module, MuonOptions options = {}, std::vector<ParamGroup> groups = {});
};

/// For FullyShardOptions::granularity: parameters of two dimensions or more, whose names `matches` accepts, are whole on one rank each;
/// larger ones first, each to the rank that has least. By default all of them. Other parameters may be cut anywhere.
std::function<Granularity(const std::string& name, const at::Tensor& parameter)> whole_matrices(
    std::function<bool(const std::string& name)> matches = {});

}  // namespace fsdp
