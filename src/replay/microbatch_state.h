#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <utility>
#include <vector>

namespace fsdp::replay {

/// The state, beside the batch and the parameters, on which a microbatch depends and which it changes: the states of torch's generators
/// (the CPU's and the device's), and the model's buffers.
struct MicrobatchState {
  std::vector<at::Tensor> generators;  ///< Bytes, on the CPU.
  std::vector<at::Tensor> buffers;     ///< Copies.
};

/// Copies the present state.
MicrobatchState copy_state(c10::Device device, const std::vector<at::Tensor>& buffers);

/// Restores the generators' states, and the values of `buffers`, from a copy. If the copy has no buffers, `buffers` stay as they are.
void put_back(const MicrobatchState& copy, c10::Device device, const std::vector<at::Tensor>& buffers);

/// All of it as bytes on the CPU, behind those of a batch.
at::Tensor packed(const at::Tensor& batch, const MicrobatchState& state);

/// The reverse: `like` has tensors of the same shapes and dtypes. Throws Error if the sizes do not fit.
std::pair<at::Tensor, MicrobatchState> unpacked(const at::Tensor& bytes, const MicrobatchState& like);

}  // namespace fsdp::replay
