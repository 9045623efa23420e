#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "fsdp/muon.h"

// The steps of Muon. The first and the last are elementwise, so they may be taken on any part of a matrix; the one between needs all of it.

namespace fsdp::optim {

/// Takes the gradient into the momentum. What it returns is to be made orthogonal.
at::Tensor muon_direction(at::Tensor& momentum, const at::Tensor& gradient, const MuonOptions& options);

/// The nearest (semi-)orthogonal matrix, roughly: U V' for a matrix U S V'. In MuonOptions::ns_dtype.
at::Tensor orthogonalized(const at::Tensor& matrix, const MuonOptions& options);

/// Of a matrix of rows x columns, or of a part of it.
void muon_update(at::Tensor& value, const at::Tensor& orthogonal, double lr, double weight_decay, AdjustLR adjust_lr, std::int64_t rows,
                 std::int64_t columns);

}  // namespace fsdp::optim
