#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/boxes.h"

// Plans the messages that bring weights from the ranks that train to ranks with another division. Pure arithmetic, without tensors or
// processes. Ranks are those of the group that contains both.
namespace fsdp::weights {

/// The part of a tensor that a rank has.
struct HeldBox {
  std::string name;
  ckpt::Shape shape;  ///< Of the whole tensor.
  at::ScalarType dtype = at::kFloat;
  ckpt::Box box;
  bool as_is = false;  ///< It is never converted: its elements are codes, even if their dtype is one of numbers.

  bool operator==(const HeldBox&) const = default;
};

/// The part of a tensor that a rank wants.
struct AskedBox {
  std::string name;
  ckpt::Box box;
  at::ScalarType dtype = at::kFloat;  ///< In which it is sent.
  bool is_converted = false;          ///< The destination has another dtype.
};

/// The boxes that a rank has, and those that it wants.
struct RankBoxes {
  std::vector<HeldBox> held;  ///< Boxes without elements are ignored.
  std::vector<AskedBox> wanted;
};

/// A box that is sent to a rank, completely from one rank.
struct SentBox {
  std::size_t tensor = 0;  ///< An index into PlannedMessages::names.
  ckpt::Box box;
  at::ScalarType dtype = at::kFloat;  ///< In which it is sent.

  std::int64_t bytes() const { return ckpt::numel(box.sizes) * static_cast<std::int64_t>(c10::elementSize(dtype)); }
};

/// Boxes that one rank sends another at once. They follow each other, each in row-major order; boxes with larger elements come first, so
/// that each is aligned.
struct Message {
  int sender = 0;
  int receiver = 0;
  std::int64_t round = 0;
  std::int64_t bytes = 0;
  std::vector<SentBox> boxes;
};

/// A box of a tensor that a rank both has and wants.
struct OwnBox {
  int rank = 0;
  SentBox box;
};

struct PlannedMessages {
  std::vector<std::string> names;
  std::vector<Message> messages;  ///< By round.
  std::vector<OwnBox> own;        ///< Boxes that are not sent.
  std::int64_t rounds = 0;
  std::int64_t largest_bytes = 0;  ///< The size of the largest box that is sent. No message is larger.
};

/// Plans a transfer. `ranks`: the boxes of each rank of the group.
///
/// A rank gets each element that it wants once, even if several of its boxes have it (in one dtype), and from one of the ranks that have
/// it: from itself if possible, and otherwise from the one that sends the least so far. Boxes above `message_bytes` (at least 16) are
/// divided. In a round, a rank sends at most one message and receives at most one. There are fewer than twice as many rounds as the busiest
/// rank has messages. Equal arguments give an equal plan on all ranks.
///
/// Throws Error, which names the rank, for a name that no rank has, a box outside of its tensor, a dtype to which a tensor is not
/// converted, elements that no rank has, and ranks that do not agree on a tensor's shape or dtype.
PlannedMessages plan_transfer(const std::vector<RankBoxes>& ranks, std::int64_t message_bytes);

/// The bytes that are sent, by sender and receiver.
std::map<std::pair<int, int>, std::int64_t> bytes_of_pairs(const PlannedMessages& plan);

}  // namespace fsdp::weights
