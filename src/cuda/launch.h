#pragma once

#include <cuda_runtime_api.h>

#include "base/block_format.h"
#include "base/rounded_arithmetic.h"
#include "comm/device_sums.h"
#include "optim/device_adamw.h"

// What the compiler for CUDA makes, for those that know streams of torch.
namespace fsdp::cuda {

cudaError_t sum(const comm::DeviceSum& sum, cudaStream_t stream);
cudaError_t encode(const BlockedPieces& pieces, cudaStream_t stream);
cudaError_t decode(const BlockedPieces& pieces, cudaStream_t stream);
cudaError_t round(const DeviceRounding& rounding, cudaStream_t stream);
cudaError_t unround(const DeviceRounding& rounding, cudaStream_t stream);
cudaError_t adamw_8bit(const optim::DeviceAdamW8bit& step, cudaStream_t stream);

}  // namespace fsdp::cuda
