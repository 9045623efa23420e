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

/// How Muon adapts the size of an update to the shape of its matrix.
enum class AdjustLR : std::uint8_t {
  kOriginal,       ///< lr * sqrt(max(1, rows / columns)): as Keller Jordan's.
  kMatchRMSAdamW,  ///< lr * 0.2 * sqrt(max(rows, columns)): updates as large as AdamW's, so AdamW's lr and weight decay fit (Moonshot).
};

/// Options of Muon for the matrices, and of AdamW for all other parameters.
struct MuonOptions {
  double lr = 0.02;                          ///< Learning rate, before `adjust_lr`.
  double weight_decay = 0;                   ///< Times the learning rate.
  double momentum = 0.95;                    ///< The factor by which the sum of earlier gradients is multiplied before a new one is added.
  bool nesterov = true;                      ///< Nesterov's form of momentum.
  AdjustLR adjust_lr = AdjustLR::kOriginal;  ///< How the learning rate depends on the shape of a matrix.
  int ns_steps = 5;                          ///< Newton-Schulz iterations.
  std::array<double, 3> ns_coefficients = {3.4445, -4.7750, 2.0315};  ///< The coefficients of x, x^3 and x^5.
  double eps = 1e-7;                                                  ///< The least norm that an update is divided by.
  /// The dtype of the iterations. The default is bfloat16, which is accurate enough. On the CPU it is float32, since few processors
  /// multiply bfloat16 as fast, and others take five times as long for it.
  std::optional<at::ScalarType> ns_dtype = std::nullopt;
  /// The parameters of two dimensions or more, by name, that Muon updates. By default these are the ones that lie on one rank
  /// (whole_matrices). Muon is meant for hidden layers, so leave embeddings and the output layer to AdamW.
  std::function<bool(const std::string& name)> matrices = {};
  /// For all other parameters.
  AdamWOptions adamw = {};
};

/// Muon (Jordan, 2024) for the matrices of hidden layers, and AdamW for all other parameters. Muon orthogonalizes the momentum before it is
/// applied, and uses decoupled weight decay. Each matrix must lie on one rank, which updates it and keeps its momentum:
///
///     const auto hidden = [](const std::string& name) { return name.starts_with("blocks."); };
///     fsdp::fully_shard(*model, {.units = ..., .granularity = fsdp::whole_matrices(hidden)});
///     fsdp::Muon optimizer(*model, {.lr = 0.02, .adamw = {.lr = 3e-4}});
///
/// A parameter of more than two dimensions counts as a matrix of size(0) rows. Given the same gradients, the result has the same bits for
/// every strategy and number of ranks. lr() is the learning rate of the matrices. A ParamGroup's settings apply to the algorithm that
/// updates its parameters.
class Muon : public Optimizer {
 public:
  /// Throws Error if an option is out of range, or if a parameter that `matrices` accepts is cut over several ranks, as a shard or as a
  /// tensor-parallel piece.
  Muon(torch::nn::Module& module, MuonOptions options = {}, std::vector<ParamGroup> groups = {});
};

/// A value for FullyShardOptions::granularity. Parameters of two dimensions or more whose names `matches` accepts (by default all) lie on
/// one rank each. They are assigned in the order of their size, the largest first, each to the rank that has least. Other parameters may be
/// cut anywhere.
std::function<Granularity(const std::string& name, const at::Tensor& parameter)> whole_matrices(
    std::function<bool(const std::string& name)> matches = {});

}  // namespace fsdp
