#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "export/changed_boxes.h"
#include "export/planned_messages.h"
#include "export/transfer_peers.h"
#include "export/transfer_side.h"
#include "export/weight_changes.h"
#include "fsdp/transfer_plan.h"

namespace fsdp::weights {

/// Sends and receives planned messages, in any number of runs. Its methods are collective over the peers, and not thread-safe.
///
/// [Note: Two buffers] A rank has memory for two messages at most, beside the tensors that it reads and writes. A message that is
/// contiguous in memory is sent from there, or received there, without a buffer. During a round, a rank packs its message of the next
/// round, if a buffer is free. It unpacks a received message during the next round, if that round can begin without the buffer. A rank that
/// only sends, or only receives, or needs no buffers for one of the two, therefore copies while messages are sent.
///
/// [Note: Counted first] With a snapshot, senders first send how many elements of each box will follow, so that both sides know the sizes
/// of messages. A sender compares twice, to count and to pack, instead of keeping the result of the comparison. It therefore needs memory
/// for one box only.
class PlannedTransfer {
 public:
  /// Ranks exchange what they have and want, and each computes the plan. Throws Error on every rank if one of them has a problem or if
  /// their settings differ, and the errors of plan_transfer; CommError if a rank does not call it in time.
  PlannedTransfer(std::shared_ptr<TransferPeers> peers, TransferSide side, const TransferSettings& settings);

  /// Sends the current values. `held`: as in the side of the plan, with the current values; `problem`: as there. Throws Error on every
  /// rank, before anything is sent, if one can't take part; CommError as TransferPlan::run does. `since`, if it is not null: the values
  /// that receivers have, on all ranks or none; only differences are sent, and it is updated.
  void run(std::vector<HeldValues> held, std::string problem, std::chrono::milliseconds timeout, SavedWeights* since = nullptr);

  const PlannedMessages& plan() const { return plan_; }
  /// The bytes that this rank has sent in the last run.
  std::int64_t travelled_bytes() const { return sent_bytes_; }
  /// The boxes that this rank sends and receives, in this order.
  std::vector<TransferMessage> messages() const;

 private:
  /// A message of this rank in one run.
  struct OwnMessage {
    const Message* message = nullptr;  ///< Null if there is none in its round.
    std::size_t first_box = 0;         ///< Its number among the boxes that this rank sends.
    std::vector<ChangedCount> counts;  ///< By box; empty if all boxes are sent completely.
    std::int64_t bytes = 0;            ///< 0: it is not sent.

    ChangedCount count(std::size_t box) const { return counts.empty() ? kAllOfIt : counts[box]; }
  };
  /// The messages of this rank in a round.
  struct Round {
    OwnMessage sent;
    OwnMessage received;
  };
  /// Memory for at most two messages.
  class Buffers {
   public:
    Buffers(std::int64_t bytes, c10::Device device) : bytes_(bytes), device_(device) {}
    std::int64_t left() const { return 2 - taken_; }
    at::Tensor take();
    void give_back(at::Tensor& buffer);

   private:
    const std::int64_t bytes_;
    const c10::Device device_;
    std::vector<at::Tensor> free_;
    std::int64_t taken_ = 0;
  };
  /// The memory of a message. `buffer` is undefined if the bytes are the tensor's own.
  struct Staged {
    at::Tensor bytes;
    at::Tensor buffer;
  };
  struct Flight {
    const Round* round = nullptr;
    Staged sent;
    Staged received;
    std::vector<PostedMessage> messages;
    std::vector<TransferPeers::Wait> waits;
    std::vector<std::string> peers;  ///< "to rank 3", by message.
  };
  /// The intersection of a target and a box, as a view of the target.
  struct Arrival {
    at::Tensor into;
    ckpt::Box common;
  };

  /// The state of a rank, which ranks exchange before they begin.
  struct Said {
    std::string what;
    std::string problem;
    std::string settings;
    bool knows = false;  ///< Whether it knows the values that receivers have.

    friend auto fields_of(Said& said) { return std::tie(said.what, said.problem, said.settings, said.knows); }
  };

  bool together(Said mine, std::chrono::milliseconds timeout) const;
  void tell_boxes(const TransferSide& side, std::int64_t message_bytes);
  void find_rounds();
  void copy_own() const;
  std::string problem_with(const SavedWeights& since) const;
  void choose(bool everything, std::chrono::milliseconds timeout);
  std::map<int, std::vector<ChangedCount>> tell_counts(const std::map<int, std::vector<ChangedCount>>& told,
                                                       std::chrono::milliseconds timeout);
  void exchange(std::chrono::milliseconds timeout);
  std::optional<Flight> prepare(const Round& round, Buffers& buffers);
  void post(Flight& flight);
  static void wait(const Flight& flight, std::chrono::milliseconds timeout);
  void unpack(const Flight& flight) const;
  void pack(const OwnMessage& own, const at::Tensor& bytes);
  at::Tensor travelling_values(const SentBox& box) const;
  std::vector<Arrival> arrivals(const SentBox& box) const;
  at::Tensor held_values(const SentBox& box) const;
  at::Tensor straight_source(const OwnMessage& own) const;
  at::Tensor straight_target(const OwnMessage& own) const;
  bool is_straight(const at::Tensor& tensor, at::ScalarType dtype) const;

  const std::shared_ptr<TransferPeers> peers_;
  PlannedMessages plan_;
  std::int64_t number_ = 0;                   ///< Of the plan, for errors.
  std::int64_t runs_ = 0;                     ///< That have begun, on all ranks alike.
  std::vector<HeldBox> signature_;            ///< The boxes that this rank had when the plan was made.
  std::vector<std::vector<Target>> targets_;  ///< By tensor.
  std::vector<Round> rounds_;
  std::size_t sent_boxes_ = 0;                 ///< The number of boxes that this rank sends.
  std::int64_t sent_bytes_ = 0;                ///< In the last run.
  std::string id_;                             ///< Of the plan in this process, for snapshots.
  SavedWeights* since_ = nullptr;              ///< While it runs; or null.
  std::vector<std::vector<HeldValues>> held_;  ///< By tensor; while it runs.
  std::string failure_;                        ///< The failure of an earlier run, after which no other run is possible.
};

}  // namespace fsdp::weights
