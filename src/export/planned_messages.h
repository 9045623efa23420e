#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/boxes.h"

// Who sends what, so that weights get from the ranks that train to ranks that want them in another division. Pure arithmetic: no tensors,
// no processes. Ranks are those of the group in which both are.
namespace fsdp::weights {

/// What a rank has of a tensor.
struct HeldBox {
  std::string name;
  ckpt::Shape shape;  ///< Of the whole tensor.
  at::ScalarType dtype = at::kFloat;
  ckpt::Box box;
  bool as_is = false;  ///< It is never converted: its elements are codes, also where their dtype is one of numbers.

  bool operator==(const HeldBox&) const = default;
};

/// What a rank wants of a tensor.
struct AskedBox {
  std::string name;
  ckpt::Box box;
  at::ScalarType dtype = at::kFloat;  ///< In which it is sent.
  bool is_converted = false;          ///< It goes into a tensor of another dtype.
};

/// What a rank has, and what it wants.
struct RankBoxes {
  std::vector<HeldBox> held;  ///< Boxes without elements count for nothing.
  std::vector<AskedBox> wanted;
};

/// A box that gets to a rank, all of it from one rank.
struct SentBox {
  std::size_t tensor = 0;  ///< An index into PlannedMessages::names.
  ckpt::Box box;
  at::ScalarType dtype = at::kFloat;  ///< In which it is sent.

  std::int64_t bytes() const { return ckpt::numel(box.sizes) * static_cast<std::int64_t>(c10::elementSize(dtype)); }
};

/// Boxes that one rank sends another at once. They lie one behind the other, each in row-major order; those of larger elements come first,
/// so that each is aligned.
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
  std::vector<OwnBox> own;        ///< What nobody sends.
  std::int64_t rounds = 0;
  std::int64_t largest_bytes = 0;  ///< The size of the largest box that is sent. No message is larger.
};

/// Plans a transfer. `ranks`: the boxes of each rank of the group.
///
/// A rank gets each element that it wants once, even if several of its boxes have it (in one dtype), and from one of the ranks that have
/// it: from itself if it can, and otherwise from the one that sends the least so far. Boxes above `message_bytes` (at least 16) are
/// divided. In a round, a rank sends at most one message and receives at most one. There are fewer than twice as many rounds as the busiest
/// rank has messages. Equal arguments give an equal plan on all ranks.
///
/// Throws Error, which names the rank, for a name that no rank has, a box outside of its tensor, a dtype to which a tensor is not
/// converted, elements that no rank has, and ranks that do not agree on a tensor's shape or dtype.
PlannedMessages plan_transfer(const std::vector<RankBoxes>& ranks, std::int64_t message_bytes);

/// The bytes that travel, by sender and receiver.
std::map<std::pair<int, int>, std::int64_t> bytes_of_pairs(const PlannedMessages& plan);

}  // namespace fsdp::weights
