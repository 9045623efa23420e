#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>

#include "fsdp/fsdp.h"

namespace fsdp::testing {

/// Matrices of which a tensor-parallel rank has the rows, or columns, from `begin` to `end`, of all that are numbered from 0; and a vector
/// that all ranks have.
struct PiecesImpl : torch::nn::Module {
  PiecesImpl(std::int64_t begin, std::int64_t end) {
    const auto numbers = at::arange(60, at::kFloat);
    rows = register_parameter("rows", numbers.view({10, 6}).narrow(0, begin, end - begin).clone());
    columns = register_parameter("columns", numbers.view({6, 10}).narrow(1, begin, end - begin).clone());
    all = register_parameter("all", numbers.clone());
  }
  at::Tensor rows, columns, all;
};

/// Sharded over "dp_shard" of the grid; their wholes lie over "tp".
inline FSDPModule shard_pieces(PiecesImpl& model, const DeviceMesh& grid) {
  return fully_shard(model, {.mesh = grid["dp_shard"],
                             .tensor_parallel = [grid](const std::string& name, const at::Tensor&) -> std::optional<TensorParallel> {
                               if (name == "all") return std::nullopt;
                               return TensorParallel{grid["tp"], name == "columns" ? 1 : 0};
                             }});
}

}  // namespace fsdp::testing
