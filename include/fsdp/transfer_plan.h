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

/// The ranks between which weights travel: those that train, and those that receive. Have one for transfers alone: a rank that dies during
/// a run closes its connections. A cheap handle: copies share the connections.
class TransferGroup {
 public:
  /// Connects all ranks that were launched, by a group of their own. `mesh`: one of init_device_mesh that has all of them; their numbers
  /// are the global ranks. Collective. Throws Error for other meshes, and CommError if the ranks can't meet.
  explicit TransferGroup(const DeviceMesh& mesh);
  /// Ranks that are connected already, also of several programs. `backend`: their c10d group, such as a ProcessGroupGloo. `store`: one that
  /// they share, under a prefix that nothing else uses; it must stay. `device`: that of the tensors which the backend moves.
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

/// A part of a tensor that a rank wants, and where it is to go.
struct WantedBox {
  std::string name;  ///< That of named_parameters() or named_buffers() of the model that is trained.
  /// Where the values go, of the box's sizes: a tensor, or a view of one with any strides, which stays where it is. Several views of one
  /// tensor take the parts of a fused weight.
  at::Tensor into;
  std::optional<std::vector<std::int64_t>> offsets = {};  ///< Where the box begins in the tensor; by default at its first element.
  /// The dtype in which it is sent; by default that of `into`. Only floating-point tensors are converted.
  std::optional<at::ScalarType> dtype = {};
};

/// Who wants what.
struct TransferOptions {
  std::vector<int> receivers;                           ///< The ranks of the group that want something; the same on all ranks.
  std::vector<WantedBox> wanted = {};                   ///< What this rank wants, if it is one of them.
  std::int64_t message_bytes = std::int64_t{32} << 20;  ///< The most bytes of a message, at least 16; the same on all ranks.
  /// How long a rank waits for another one, when the plan is made and in each run.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// A box that travels.
struct TransferBox {
  std::string name;                   ///< The tensor's.
  std::vector<std::int64_t> offsets;  ///< Of its first element in the whole tensor, by dimension.
  std::vector<std::int64_t> sizes;    ///< By dimension, in elements.
  at::ScalarType dtype;               ///< In which it travels.
};

/// Boxes that travel together.
struct TransferMessage {
  int sender = 0;                  ///< A rank of the group.
  int receiver = 0;                ///< The same.
  std::vector<TransferBox> boxes;  ///< In the order in which they lie in the message.
};

/// Who sends which parts of the weights to whom: see transfer_plan. Not thread-safe.
class TransferPlan {
 public:
  /// For the library's own use: all ranks of the group make one together.
  TransferPlan(torch::nn::Module* module, const TransferGroup& group, const TransferOptions& options);
  ~TransferPlan();
  /// The plan that is left must not be used.
  TransferPlan(TransferPlan&&) noexcept;

  /// Sends the weights of now. Every rank of the group calls it, between steps or between microbatches; nothing of the model changes. When
  /// it returns, all receivers have everything. Optimizers' steps and loads on other threads wait until it returns.
  ///
  /// Throws Error on all ranks if one of them can't take part; nothing was sent. Throws CommError on all ranks if one did not come in time;
  /// nothing was sent then, and the plan can run again. Also if one has died on the way: receivers may then have some of the new values,
  /// and another run needs a new group and a new plan.
  void run();
  /// Sends only what is not as it is in the snapshot, on all ranks of the group, each with a snapshot of its own. A box is then sent as
  /// positions and values of single elements where that has fewer bytes, not at all where nothing has changed, and whole where not. Bits
  /// are compared, in the dtype that travels, so receivers have the bits of a whole run. The first run of a snapshot sends everything. A
  /// snapshot belongs to one plan, as receivers keep what has come.
  void run(WeightSnapshot& since);

  /// The bytes that this rank has sent in the last run.
  std::int64_t travelled_bytes() const;
  /// The bytes that travel in a run, by sender and receiver (ranks of the group).
  std::map<std::pair<int, int>, std::int64_t> bytes_sent() const;
  /// What this rank sends and receives, in this order.
  std::vector<TransferMessage> messages() const;
  /// The number of rounds. In each, a rank sends one message at most, and receives one at most.
  std::int64_t rounds() const;
  /// The size of the largest box that travels. No message is larger; a rank has buffers for two of them at most.
  std::int64_t largest_bytes() const;

 private:
  void run(WeightSnapshot* since);

  struct Source;
  std::unique_ptr<Source> source_;
  std::unique_ptr<weights::PlannedTransfer> transfer_;
  std::chrono::milliseconds timeout_;
};

/// Plans how weights get from the ranks that train to ranks that want other parts of them, such as those of an inference engine.
///
/// The ranks of the group tell each other once which parts they have and want. Each run() of the plan then sends every element that a
/// receiver wants to it once, straight from the shard of one of the ranks that have it, already in the dtype that is wanted. What a rank
/// both wants and has, it copies by itself. Boxes above `message_bytes` are divided.
///
/// Every rank of the group calls it. `module`: the sharded model on ranks that train (the root, or a unit, of which the whole model is
/// given); null on others. The plan does not keep the module alive, but its shards and buffers. Throws Error on all ranks if an argument is
/// wrong on one, if they differ, if no parameter or buffer has a name, if a box is outside of its tensor, or if a tensor is not converted
/// to a dtype; training can go on. Throws CommError on all ranks, with the number of a rank that did not come in time.
TransferPlan transfer_plan(torch::nn::Module* module, const TransferGroup& group, const TransferOptions& options);

}  // namespace fsdp
