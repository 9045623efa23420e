#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "export/meetings.h"

namespace fsdp::weights {

/// A message between this rank and another one, and its memory: contiguous bytes on the device of the group.
struct PostedMessage {
  bool sends = false;  ///< From this rank; else to it.
  int peer = 0;
  at::Tensor bytes;
};

/// The ranks of a transfer, as one of them reaches the others.
class TransferPeers {
 public:
  /// Waits for something that has been posted. Throws std::runtime_error if it does not end in time, or can't.
  using Wait = std::function<void(std::chrono::milliseconds timeout)>;

  explicit TransferPeers(std::shared_ptr<Meetings> meetings) : meetings_(std::move(meetings)) {}
  virtual ~TransferPeers() = default;
  TransferPeers(const TransferPeers&) = delete;
  TransferPeers& operator=(const TransferPeers&) = delete;

  int rank() const { return meetings_->rank(); }
  int size() const { return meetings_->size(); }
  Meetings& meetings() const { return *meetings_; }

  /// Where the memory of messages must lie.
  virtual c10::Device device() const = 0;
  /// Returns the bytes of every rank. Collective; throws std::exception.
  virtual std::vector<std::string> exchange(const std::string& bytes) const = 0;
  /// Begins to send and to receive. Messages from one rank to another arrive in the order in which they were posted. Returns one wait for
  /// each message, or one for all. The memory must stay until then. Throws std::exception.
  virtual std::vector<Wait> post(const std::vector<PostedMessage>& messages) const = 0;

 private:
  const std::shared_ptr<Meetings> meetings_;
};

}  // namespace fsdp::weights
