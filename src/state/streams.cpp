#include "state/streams.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>

#include "memory/device_memory.h"

namespace fsdp::state {
namespace {

constexpr std::int64_t kPiece = std::int64_t{4} << 20;
constexpr comm::Label kLabel = {.operation = "checkpoint: copies between hosts", .unit = {}};

}  // namespace

void run_streams(const std::vector<std::shared_ptr<comm::Communicator>>& pairs, const std::vector<Stream>& streams) {
  std::exception_ptr failure;
  std::vector<bool> failed(streams.size(), false);
  const auto move = [&](std::size_t i, std::int64_t offset, const at::Tensor& piece) {
    if (failed[i]) return;
    try {
      streams[i].move(offset, {static_cast<char*>(piece.mutable_data_ptr()), static_cast<std::size_t>(piece.numel())});
    } catch (const std::exception&) {
      failed[i] = true;
      if (!failure) failure = std::current_exception();
    }
  };
  std::int64_t longest = 0;
  std::vector<at::Tensor> buffers;
  for (const auto& stream : streams) {
    longest = std::max(longest, stream.bytes);
    buffers.push_back(memory::zeros(at::kCPU, std::min(stream.bytes, kPiece)));
  }
  const auto nothing = at::empty({0}, at::kByte);
  // Each rank begins all messages of a round before it waits for one, so that rounds complete in their order on all pairs.
  for (std::int64_t offset = 0; offset < longest; offset += kPiece) {
    std::vector<std::unique_ptr<comm::Pending>> pending(streams.size());
    std::vector<at::Tensor> pieces(streams.size());
    for (std::size_t i = 0; i < streams.size(); ++i) {
      if (offset >= streams[i].bytes) continue;
      pieces[i] = buffers[i].narrow(0, 0, std::min(kPiece, streams[i].bytes - offset));
      const bool sends = pairs[i]->rank() == 0;
      if (sends) move(i, offset, pieces[i]);
      const comm::ScatterPart part = {.shards = sends ? std::vector{nothing, pieces[i]} : std::vector<at::Tensor>(),
                                      .into = sends ? nothing : pieces[i]};
      pending[i] = pairs[i]->scatter({&part, 1}, /*root=*/0, kLabel);
    }
    for (std::size_t i = 0; i < streams.size(); ++i) {
      if (pending[i] == nullptr) continue;
      pending[i]->wait();
      if (pairs[i]->rank() != 0) move(i, offset, pieces[i]);
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fsdp::state
