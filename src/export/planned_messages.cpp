#include "export/planned_messages.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::weights {
namespace {

using ckpt::Box;

/// A box, and the ranks that have it.
struct Origin {
  Box box;
  std::vector<int> ranks;
};

struct Tensor {
  ckpt::Shape shape;
  at::ScalarType dtype = at::kFloat;
  bool as_is = false;
  int first_rank = 0;  ///< The first one that has something of it.
  std::vector<Origin> origins;
};

/// Appends the parts of a box that have at most `limit` elements each.
void append_divided(const Box& box, std::int64_t limit, std::vector<Box>& parts) {
  const auto all = ckpt::numel(box.sizes);
  if (all <= limit) return parts.push_back(box);
  std::size_t d = 0;  // the dimension that is cut; of those before, a part has one index
  std::int64_t row = all / box.sizes[0];
  while (row > limit) row /= box.sizes[++d];
  const auto step = limit / row;
  Box part = box;
  std::fill_n(part.sizes.begin(), d, 1);
  const auto end = [&](std::size_t i) { return box.offsets[i] + box.sizes[i]; };
  for (;;) {
    for (part.offsets[d] = box.offsets[d]; part.offsets[d] < end(d); part.offsets[d] += step) {
      part.sizes[d] = std::min(step, end(d) - part.offsets[d]);
      parts.push_back(part);
    }
    std::size_t i = d;
    while (i > 0 && ++part.offsets[i - 1] == end(i - 1)) {
      part.offsets[i - 1] = box.offsets[i - 1];
      --i;
    }
    if (i == 0) return;
  }
}

/// As whether intersection() gives something, but without memory for it: most boxes of large models share none.
bool share_elements(const Box& a, const Box& b) {
  for (std::size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.offsets[d] >= b.offsets[d] + b.sizes[d] || b.offsets[d] >= a.offsets[d] + a.sizes[d]) return false;
  }
  return true;
}

/// Takes `cut` out of boxes.
void remove_from(std::vector<Box>& boxes, const Box& cut) {
  std::vector<Box> left;
  for (const auto& box : boxes) ckpt::append_difference(box, cut, left);
  boxes = std::move(left);
}

class Planner {
 public:
  Planner(const std::vector<RankBoxes>& ranks, std::int64_t message_bytes) : ranks_(ranks), message_bytes_(message_bytes) {
    if (message_bytes < 16) throw Error("transfer_plan: messages of at most " + std::to_string(message_bytes) + " bytes; it takes 16");
  }

  PlannedMessages plan() {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) add_held(static_cast<int>(rank));
    sent_bytes_.resize(ranks_.size());
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      known_.clear();
      for (const auto& wanted : ranks_[rank].wanted) add_wanted(static_cast<int>(rank), wanted);
    }
    pack();
    schedule();
    return std::move(plan_);
  }

 private:
  using Pair = std::pair<int, int>;  // sender and receiver

  void add_held(int rank) {
    std::size_t likely = 0;  // Ranks have their tensors in the same order.
    for (const auto& held : ranks_[static_cast<std::size_t>(rank)].held) {
      if (likely >= plan_.names.size() || plan_.names[likely] != held.name) {
        const auto [found, is_new] = index_.try_emplace(held.name, tensors_.size());
        if (is_new) {
          plan_.names.push_back(held.name);
          tensors_.push_back({.shape = held.shape, .dtype = held.dtype, .as_is = held.as_is, .first_rank = rank, .origins = {}});
        }
        likely = found->second;
      }
      const auto tensor = likely++;
      auto& known = tensors_[tensor];
      if (known.shape != held.shape || known.dtype != held.dtype) {
        throw Error("transfer_plan: '" + held.name + "' has the shape " + in_brackets(known.shape) + " and the dtype " +
                    c10::toString(known.dtype) + " on rank " + std::to_string(known.first_rank) + ", but " + in_brackets(held.shape) +
                    " and " + c10::toString(held.dtype) + " on rank " + std::to_string(rank));
      }
      if (ckpt::numel(held.box.sizes) == 0) continue;
      ckpt::check_within(held.box, held.shape);
      const auto [found, is_new] = origin_of_.try_emplace({tensor, held.box.offsets, held.box.sizes}, known.origins.size());
      if (is_new) known.origins.push_back({.box = held.box, .ranks = {}});
      known.origins[found->second].ranks.push_back(rank);
    }
  }

  /// Returns the tensor.
  std::size_t check(int rank, const AskedBox& wanted) const {
    const auto who = "transfer_plan: rank " + std::to_string(rank) + " wants ";
    const auto found = index_.find(wanted.name);
    if (found == index_.end()) {
      throw Error(who + "'" + wanted.name + "', which no rank has; the names are those of state_dict() of the model that is trained");
    }
    const auto& tensor = tensors_[found->second];
    const auto dimensions = tensor.shape.size();
    bool within = wanted.box.offsets.size() == dimensions && wanted.box.sizes.size() == dimensions;
    for (std::size_t d = 0; within && d < dimensions; ++d) {
      within = wanted.box.offsets[d] >= 0 && wanted.box.sizes[d] >= 0 && wanted.box.offsets[d] <= tensor.shape[d] &&
               wanted.box.sizes[d] <= tensor.shape[d] - wanted.box.offsets[d];
    }
    if (!within) {
      throw Error(who + "the box of sizes " + in_brackets(wanted.box.sizes) + " at " + in_brackets(wanted.box.offsets) + " of '" +
                  wanted.name + "', which has the shape " + in_brackets(tensor.shape));
    }
    if (wanted.dtype != tensor.dtype && !(c10::isFloatingType(wanted.dtype) && c10::isFloatingType(tensor.dtype))) {
      throw Error(who + "'" + wanted.name + "' in " + c10::toString(wanted.dtype) + ", but it is " + c10::toString(tensor.dtype) +
                  "; only floating-point tensors are converted");
    }
    if (tensor.as_is && (wanted.dtype != tensor.dtype || wanted.is_converted)) {
      throw Error(who + "'" + wanted.name + "' converted, but its elements are codes of quantized numbers; want them in " +
                  c10::toString(tensor.dtype) + ", into a tensor of this dtype, with what is named behind them");
    }
    return found->second;
  }

  void add_wanted(int rank, const AskedBox& wanted) {
    const auto tensor = check(rank, wanted);
    if (ckpt::numel(wanted.box.sizes) == 0) return;
    std::vector<Box> missing = {wanted.box};
    auto& known = known_[{tensor, wanted.dtype}];
    for (const auto& box : known) remove_from(missing, box);
    known.push_back(wanted.box);
    const auto limit = message_bytes_ / static_cast<std::int64_t>(c10::elementSize(wanted.dtype));
    for (const auto& origin : tensors_[tensor].origins) {
      if (std::ranges::none_of(missing, [&](const auto& box) { return share_elements(box, origin.box); })) continue;
      std::vector<Box> common;
      for (const auto& box : missing) {
        if (const auto both = ckpt::intersection(box, origin.box)) append_divided(*both, limit, common);
      }
      for (auto& box : common) add_sent(rank, origin, {.tensor = tensor, .box = std::move(box), .dtype = wanted.dtype});
      remove_from(missing, origin.box);
      if (missing.empty()) return;
    }
    if (missing.empty()) return;
    throw Error("transfer_plan: rank " + std::to_string(rank) + " wants '" + wanted.name + "', of which no rank has the box of sizes " +
                in_brackets(missing[0].sizes) + " at " + in_brackets(missing[0].offsets) + "; all ranks that train must be in the group");
  }

  void add_sent(int receiver, const Origin& origin, SentBox box) {
    const auto bytes_of = [&](int rank) -> std::int64_t& { return sent_bytes_[static_cast<std::size_t>(rank)]; };
    if (std::ranges::find(origin.ranks, receiver) != origin.ranks.end()) {
      plan_.own.push_back({.rank = receiver, .box = std::move(box)});
      return;
    }
    const auto sender = *std::ranges::min_element(origin.ranks, {}, bytes_of);
    bytes_of(sender) += box.bytes();
    plan_.largest_bytes = std::max(plan_.largest_bytes, box.bytes());
    of_pairs_[{sender, receiver}].push_back(std::move(box));
  }

  void pack() {
    for (auto& [pair, boxes] : of_pairs_) {
      auto& messages = queues_[pair];
      for (auto& box : boxes) {
        const auto bytes = box.bytes();
        if (messages.empty() || messages.back().bytes + bytes > plan_.largest_bytes) {
          messages.push_back({.sender = pair.first, .receiver = pair.second, .boxes = {}});
        }
        messages.back().bytes += bytes;
        messages.back().boxes.push_back(std::move(box));
      }
      for (auto& message : messages) {
        std::ranges::stable_sort(message.boxes, std::ranges::greater{}, [](const auto& box) { return c10::elementSize(box.dtype); });
      }
      std::ranges::reverse(messages);  // They are taken from the end.
    }
    of_pairs_.clear();
  }

  /// A message is put off only in rounds in which its sender or its receiver has another one, hence the promised number of rounds. Ranks
  /// that have the most left come first.
  void schedule() {
    struct Sender {
      int rank = 0;
      std::size_t left = 0;  ///< Messages.
      std::vector<std::pair<int, std::vector<Message>>> queues;
    };
    std::map<int, Sender> by_rank;
    std::vector<std::size_t> left_of_receiver(ranks_.size());
    for (auto& [pair, messages] : queues_) {
      auto& sender = by_rank[pair.first];
      sender.rank = pair.first;
      sender.left += messages.size();
      left_of_receiver[static_cast<std::size_t>(pair.second)] += messages.size();
      sender.queues.emplace_back(pair.second, std::move(messages));
    }
    std::vector<Sender> senders;
    for (auto& [rank, sender] : by_rank) senders.push_back(std::move(sender));
    for (; !senders.empty(); ++plan_.rounds) {
      std::ranges::stable_sort(senders, std::ranges::greater{}, &Sender::left);
      std::vector<bool> is_taken(ranks_.size());
      for (auto& sender : senders) {
        std::vector<Message>* best = nullptr;
        std::size_t left_of_best = 0;
        for (auto& [receiver, messages] : sender.queues) {
          const auto left = left_of_receiver[static_cast<std::size_t>(receiver)];
          if (messages.empty() || is_taken[static_cast<std::size_t>(receiver)] || left <= left_of_best) continue;
          best = &messages;
          left_of_best = left;
        }
        if (best == nullptr) continue;
        auto message = std::move(best->back());
        best->pop_back();
        message.round = plan_.rounds;
        is_taken[static_cast<std::size_t>(message.receiver)] = true;
        --left_of_receiver[static_cast<std::size_t>(message.receiver)];
        --sender.left;
        plan_.messages.push_back(std::move(message));
      }
      std::erase_if(senders, [](const Sender& sender) { return sender.left == 0; });
    }
  }

  const std::vector<RankBoxes>& ranks_;
  std::int64_t message_bytes_;
  std::vector<Tensor> tensors_;
  std::unordered_map<std::string, std::size_t> index_;                                  ///< Of a tensor, by name.
  std::map<std::tuple<std::size_t, ckpt::Shape, ckpt::Shape>, std::size_t> origin_of_;  ///< By tensor, offsets and sizes.
  std::map<std::pair<std::size_t, at::ScalarType>, std::vector<Box>> known_;            ///< What the receiver gets so far.
  std::vector<std::int64_t> sent_bytes_;
  std::map<Pair, std::vector<SentBox>> of_pairs_;
  std::map<Pair, std::vector<Message>> queues_;
  PlannedMessages plan_;
};

}  // namespace

PlannedMessages plan_transfer(const std::vector<RankBoxes>& ranks, std::int64_t message_bytes) {
  return Planner(ranks, message_bytes).plan();
}

std::map<std::pair<int, int>, std::int64_t> bytes_of_pairs(const PlannedMessages& plan) {
  std::map<std::pair<int, int>, std::int64_t> bytes;
  for (const auto& message : plan.messages) bytes[{message.sender, message.receiver}] += message.bytes;
  return bytes;
}

}  // namespace fsdp::weights
