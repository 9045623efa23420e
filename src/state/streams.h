#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"

namespace fsdp::state {

/// Bytes that one rank sends to another one.
struct Stream {
  std::int64_t bytes = 0;
  /// On the sender, reads `data` from position `offset` on; on the receiver, writes it there. May throw.
  std::function<void(std::int64_t offset, std::span<char> data)> move;
};

/// Sends and receives the streams of this rank, one over each of its pairs (comm::connect_pairs), all at once, in pieces of a few MiB. If
/// `move` throws, the remaining bytes of its stream are sent nevertheless, so that no rank waits, and the first exception is thrown at the
/// end. Collective over the ranks of the pairs. Throws CommError.
void run_streams(const std::vector<std::shared_ptr<comm::Communicator>>& pairs, const std::vector<Stream>& streams);

}  // namespace fsdp::state
