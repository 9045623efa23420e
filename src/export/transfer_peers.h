#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

namespace fsdp::weights {

/// A message between this rank and another one, and its memory: contiguous bytes on the device of the group.
struct PostedMessage {
  bool sends = false;  ///< True: from this rank; false: to it.
  int peer = 0;
  at::Tensor bytes;
};

/// Connects this rank with the other ranks of a transfer. Not thread-safe.
class TransferPeers {
 public:
  /// Waits for messages that were posted. Throws std::runtime_error if they do not complete in time, or can't.
  using Wait = std::function<void(std::chrono::milliseconds timeout)>;

  /// `group`, `store`: null for a group of one rank. `device`: where the memory of messages must lie.
  TransferPeers(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store, c10::Device device)
      : group_(std::move(group)), store_(std::move(store)), device_(device) {}
  virtual ~TransferPeers() = default;

  int rank() const { return group_ == nullptr ? 0 : group_->getRank(); }
  int size() const { return group_ == nullptr ? 1 : group_->getSize(); }
  c10::Device device() const { return device_; }

  /// Returns each rank's text after all ranks have called it. It uses the store, because a collective does not name a rank for which it has
  /// waited too long (and Gloo then closes the connections of all ranks). Rank 0, which serves the store of most groups, returns last, so
  /// that it may end then. Throws CommError on all ranks that have called it, if another rank has not called it in time, with its number;
  /// or if the store has ended.
  ///
  /// [Note: One verdict] A rank for which others have waited too long may arrive at that very moment. Therefore each rank proposes its
  /// view, and the store keeps the first proposal, which all ranks use.
  std::vector<std::string> rendezvous(const std::string& text, std::chrono::milliseconds timeout);
  /// The number of calls of rendezvous(), which is the same on all ranks.
  std::int64_t rendezvous_count() const { return count_; }

  /// Returns the bytes of every rank. Collective; throws std::exception.
  std::vector<std::string> exchange(const std::string& bytes) const;
  /// Begins to send and to receive. Messages from one rank to another arrive in the order in which they were posted. Returns one wait for
  /// each message, or one for all. The memory must stay until then. Throws std::exception.
  virtual std::vector<Wait> post(const std::vector<PostedMessage>& messages) const;

 private:
  std::vector<std::string> rendezvous_at(std::int64_t number, const std::string& text, std::chrono::milliseconds timeout);
  void leave(std::int64_t number, std::chrono::milliseconds timeout);
  std::vector<at::Tensor> gather(const at::Tensor& mine) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Store> store_;
  c10::Device device_;
  std::int64_t count_ = 0;
};

}  // namespace fsdp::weights
