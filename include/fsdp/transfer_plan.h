#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/device_mesh.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace fsdp {

namespace weights {
class PlannedTransfer;
class TransferPeers;
}  // namespace weights

/// The ranks of a weight transfer: those that train, and those that receive. Use a separate group for transfers, because a rank that dies
/// during a run closes its connections. A cheap handle: copies share the connections.
class TransferGroup {
 public:
  /// Connects all launched ranks by a process group of their own. `mesh`: a mesh of init_device_mesh with all ranks; their numbers are the
  /// global ranks. Collective. Throws Error for other meshes, and CommError if the rendezvous fails.
  explicit TransferGroup(const DeviceMesh& mesh);
  /// Uses connected ranks, also of several programs. `backend`: their c10d group, such as a ProcessGroupGloo. `store`: their common store,
  /// with a prefix that nothing else uses; it must outlive the group. `device`: the device of the tensors that the backend sends.
  TransferGroup(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store,
                c10::Device device = c10::kCPU);

  int rank() const;  ///< This rank's place in the group.
  int size() const;  ///< In ranks.

  /// For the library's own use.
  const std::shared_ptr<weights::TransferPeers>& peers() const { return peers_; }

 private:
  std::shared_ptr<weights::TransferPeers> peers_;
};

class WeightSnapshot;

/// A chunk of a tensor that a rank wants, and its destination.
struct WantedBox {
  std::string name;  ///< The name in named_parameters() or named_buffers() of the trained model.
  /// The destination, with the sizes of the chunk: a tensor, or a view of one with any strides, whose memory must not change. For the parts
  /// of a fused weight, use several views of one tensor.
  at::Tensor into;
  std::optional<std::vector<std::int64_t>> offsets = {};  ///< Where the chunk begins in the tensor; by default at its first element.
  /// The dtype in which it is sent; by default that of `into`. Only floating-point tensors are converted.
  std::optional<at::ScalarType> dtype = {};
};

/// The receivers of a transfer, and the parts that they want.
struct TransferOptions {
  std::vector<int> receivers;                           ///< The ranks of the group that receive; the same on all ranks.
  std::vector<WantedBox> wanted = {};                   ///< The chunks that this rank wants, if it is a receiver.
  std::int64_t message_bytes = std::int64_t{32} << 20;  ///< The most bytes of a message, at least 16; the same on all ranks.
  /// How long a rank waits for another one, when the plan is made and in each run.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// A chunk that is sent.
struct TransferBox {
  std::string name;                   ///< The name of the tensor.
  std::vector<std::int64_t> offsets;  ///< Of its first element in the complete tensor, by dimension.
  std::vector<std::int64_t> sizes;    ///< By dimension, in elements.
  at::ScalarType dtype;               ///< The dtype in which it is sent.
};

/// Chunks that are sent together.
struct TransferMessage {
  int sender = 0;                  ///< A rank of the group.
  int receiver = 0;                ///< A rank of the group.
  std::vector<TransferBox> boxes;  ///< In their order in the message.
};

/// A plan of which rank sends which parts of the weights to which rank: see transfer_plan. Not thread-safe.
class TransferPlan {
 public:
  /// For the library's own use: all ranks of the group make one together.
  TransferPlan(torch::nn::Module* module, const TransferGroup& group, const TransferOptions& options);
  ~TransferPlan();
  /// Moves the plan; the other object must not be used.
  TransferPlan(TransferPlan&&) noexcept;

  /// Sends the current weights. Every rank of the group calls it, between steps or between microbatches; the model does not change. When it
  /// returns, all receivers have all values. Optimizers' steps and loads on other threads wait until it returns.
  ///
  /// Throws Error on all ranks if one of them can't take part; nothing was sent. Throws CommError on all ranks if one did not call it in
  /// time; nothing was sent then, and the plan can run again. Also throws CommError if a rank has died during the run: receivers may then
  /// have some of the new values, and another run needs a new group and a new plan.
  void run();
  /// Sends only values that differ from the snapshot. Each rank of the group passes a snapshot of its own. A chunk is sent as positions and
  /// values of single elements if that has fewer bytes, otherwise completely, and not at all if nothing has changed. Bits are compared, in
  /// the dtype in which values are sent, so receivers have the same bits as after a complete run. The first run of a snapshot sends
  /// everything. A snapshot belongs to one plan, because receivers keep the values of earlier runs.
  void run(WeightSnapshot& since);

  /// The bytes that this rank has sent in the last run.
  std::int64_t travelled_bytes() const;
  /// The bytes that are sent in a complete run, by sender and receiver (ranks of the group).
  std::map<std::pair<int, int>, std::int64_t> bytes_sent() const;
  /// The messages that this rank sends and receives, in this order.
  std::vector<TransferMessage> messages() const;
  /// The number of rounds. In each, a rank sends one message at most, and receives one at most.
  std::int64_t rounds() const;
  /// The size of the largest chunk that is sent. No message is larger; a rank has buffers for two of them at most.
  std::int64_t largest_bytes() const;

 private:
  void run(WeightSnapshot* since);

  struct Source;
  std::unique_ptr<Source> source_;
  std::unique_ptr<weights::PlannedTransfer> transfer_;
  std::chrono::milliseconds timeout_;
};

/// Plans how weights are sent from the ranks that train to ranks with another sharding, such as those of an inference engine.
///
/// The ranks of the group exchange once which parts they have and want. Each run() of the plan then sends every element that a receiver
/// wants to it once, directly from the shard of one of the ranks that have it, in the dtype that the receiver wants. If a rank has a part
/// that it wants, it copies it by itself. Chunks above `message_bytes` are divided.
///
/// Every rank of the group calls it. `module`: the sharded model on ranks that train (the root, or any unit of the model); null on others.
/// The plan does not keep the module alive, but its shards and buffers. Throws Error on all ranks if an argument is wrong on one, if
/// arguments differ, if no parameter or buffer has a name, if a chunk is outside of its tensor, or if a tensor can't be converted to a
/// dtype; training can continue. Throws CommError on all ranks, with the number of a rank that did not call it in time.
TransferPlan transfer_plan(torch::nn::Module* module, const TransferGroup& group, const TransferOptions& options);

}  // namespace fsdp
