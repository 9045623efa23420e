#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "fsdp/muon.h"

// The steps of Muon. The first and the last step are elementwise, so they work on any part of a matrix. The step between them needs the
// whole matrix.

namespace fsdp::optim {

/// Updates the momentum from the gradient. Returns the matrix that is to be made orthogonal.
at::Tensor muon_direction(at::Tensor& momentum, const at::Tensor& gradient, const MuonOptions& options);

/// Returns approximately the nearest (semi-)orthogonal matrix: U V' for a matrix U S V'. It computes in MuonOptions::ns_dtype.
at::Tensor orthogonalized(const at::Tensor& matrix, const MuonOptions& options);

/// Applies the orthogonal update to a matrix of rows x columns, or to a part of it.
void muon_update(at::Tensor& value, const at::Tensor& orthogonal, double lr, double weight_decay, AdjustLR adjust_lr, std::int64_t rows,
                 std::int64_t columns);

}  // namespace fsdp::optim
