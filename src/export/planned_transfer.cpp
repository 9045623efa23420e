#include "export/planned_transfer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <unordered_map>

#include "base/exception_text.h"
#include "base/text.h"
#include "export/encoding.h"
#include "fsdp/error.h"

namespace fsdp::weights {
namespace {

/// Returns a box out of the values of the box that begins at `begin`, as a view.
at::Tensor values_in(at::Tensor values, const ckpt::Shape& begin, const ckpt::Box& box) {
  for (std::size_t d = 0; d < box.sizes.size(); ++d) {
    const auto dimension = static_cast<std::int64_t>(d);
    if (box.sizes[d] != values.size(dimension)) values = values.narrow(dimension, box.offsets[d] - begin[d], box.sizes[d]);
  }
  return values;
}

/// The boxes of a message with their bytes in it, those that travel whole first: these are aligned so.
template <typename OwnMessage, typename Visit>
void for_each_box(const OwnMessage& own, const at::Tensor& bytes, const Visit& visit) {
  std::int64_t begin = 0;
  for (const bool whole : {true, false}) {
    for (std::size_t i = 0; i < own.message->boxes.size(); ++i) {
      const auto count = own.count(i);
      if ((count == kAllOfIt) != whole || count == 0) continue;
      const auto size = travelling_bytes(own.message->boxes[i], count);
      visit(i, count, bytes.narrow(0, begin, size));
      begin += size;
    }
  }
}

at::Tensor values_of(const SentBox& box, const at::Tensor& bytes) { return bytes.view(box.dtype).view(box.box.sizes); }

std::string handled_exception_text() {
  auto text = current_exception_text();
  return text.empty() ? "an error without a message" : text;
}

}  // namespace

PlannedTransfer::PlannedTransfer(std::shared_ptr<TransferPeers> peers, TransferSide side, const TransferSettings& settings)
    : peers_(std::move(peers)) {
  const auto problem = problem_of(side, settings, peers_->rank(), peers_->size());
  static std::atomic<std::int64_t> count = 0;
  id_ = "plan " + std::to_string(count++);
  const auto text = "receivers " + in_brackets(settings.receivers) + " and message_bytes " + std::to_string(settings.message_bytes);
  together({.what = "plan", .problem = problem, .settings = text}, settings.timeout);
  number_ = peers_->rendezvous_count();
  tell_boxes(side, settings.message_bytes);
  for (const auto& [held, values] : side.held) signature_.push_back(held);
  find_rounds();
}

/// Returns whether all ranks know what receivers have. Throws Error on all ranks, unless all have come for the same, and none has a
/// problem.
bool PlannedTransfer::together(Said mine, std::chrono::milliseconds timeout) const {
  std::string encoded;
  encode(encoded, mine);
  std::vector<Said> all;
  for (std::string_view bytes : peers_->rendezvous(encoded, timeout)) decode(bytes, all.emplace_back());
  const auto& first = all.front();
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto number = std::to_string(rank);
    if (all[rank].what != first.what) {
      throw Error("transfer_plan: rank 0 of the group has come for a " + first.what + ", and rank " + number + " for a " + all[rank].what);
    }
    if (!all[rank].problem.empty()) throw Error("transfer_plan: rank " + number + " of the group: " + all[rank].problem);
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].settings == first.settings) continue;
    throw Error("transfer_plan: the ranks of the group do not agree: rank 0 has " + first.settings + ", and rank " + std::to_string(rank) +
                " has " + all[rank].settings);
  }
  return std::ranges::all_of(all, &Said::knows);
}

/// Makes the plan of what all ranks have and want.
void PlannedTransfer::tell_boxes(const TransferSide& side, std::int64_t message_bytes) {
  std::pair mine{RankBoxes(), side.aliases};
  for (const auto& [held, values] : side.held) mine.first.held.push_back(held);
  for (const auto& [wanted, into] : side.targets) mine.first.wanted.push_back(wanted);
  std::string encoded;
  encode(encoded, mine);
  std::vector<std::string> told;
  try {
    told = peers_->exchange(encoded);
  } catch (const std::exception&) {
    throw CommError("transfer_plan: a rank has ended while the ranks exchanged their requests: " + current_exception_text());
  }
  std::vector<RankBoxes> ranks;
  std::unordered_map<std::string, std::string> names;  // of tensors that are tied, by their other names
  for (std::string_view bytes : told) {
    decltype(mine) of_rank;
    decode(bytes, of_rank);
    ranks.push_back(std::move(of_rank.first));
    for (auto& [alias, name] : of_rank.second) names[std::move(alias)] = std::move(name);
  }
  const auto name_of = [&](const std::string& name) {
    const auto found = names.find(name);
    return found == names.end() ? name : found->second;
  };
  for (auto& rank : ranks) {
    for (auto& wanted : rank.wanted) wanted.name = name_of(wanted.name);
  }
  plan_ = plan_transfer(ranks, message_bytes);
  std::unordered_map<std::string, std::size_t> indices;
  for (std::size_t i = 0; i < plan_.names.size(); ++i) indices[plan_.names[i]] = i;
  targets_.resize(plan_.names.size());
  for (const auto& target : side.targets) targets_[indices.at(name_of(target.wanted.name))].push_back(target);
}

void PlannedTransfer::find_rounds() {
  std::int64_t number = -1;
  for (const auto& message : plan_.messages) {
    const bool sends = message.sender == peers_->rank();
    if (!sends && message.receiver != peers_->rank()) continue;
    if (message.round != number) rounds_.emplace_back();
    number = message.round;
    auto& own = sends ? rounds_.back().sent : rounds_.back().received;
    own.message = &message;
    own.first_box = sent_boxes_;
    if (sends) sent_boxes_ += message.boxes.size();
  }
}

/// Empty if the snapshot can be used.
std::string PlannedTransfer::problem_with(const SavedWeights& since) const {
  if (since.state == SnapshotState::kMoving) return "since belongs to a stream that has not ended";
  if (since.state == SnapshotState::kUnknown || since.id == id_) return {};
  return "since was used for another plan, or for full_weights: give a new WeightSnapshot, and everything is sent";
}

void PlannedTransfer::run(std::vector<HeldValues> held, std::string problem, std::chrono::milliseconds timeout, SavedWeights* since) {
  const at::NoGradGuard no_grad;
  Said said{.what = "run of plan " + std::to_string(number_), .problem = std::move(problem), .settings = "no snapshot"};
  if (!failure_.empty()) {
    said.problem = "an earlier run has failed (" + failure_ + "): make a new group and a new plan";
  } else if (said.problem.empty() && !std::ranges::equal(held, signature_, {}, &HeldValues::held)) {
    said.problem = "the model's shards are not those of which the plan was made: make a new plan";
  }
  if (since != nullptr) {
    if (said.problem.empty()) said.problem = problem_with(*since);
    said.settings = "a snapshot after " + std::to_string(since->streams) + " runs";
    said.knows = since->state == SnapshotState::kKnown && since->last_run == runs_;
  }
  const bool everything = !together(said, timeout);
  ++runs_;
  if (since != nullptr) {
    if (since->id != id_) since->shards.clear();
    since->form = {"a transfer plan"};
    since->id = id_;
    since->state = SnapshotState::kUnknown;  // Until all has come on all ranks.
    ++since->streams;
    since->shards.resize(sent_boxes_);
  }
  std::string failure;
  try {
    since_ = since;
    held_.resize(plan_.names.size());
    std::size_t tensor = 0;
    for (auto& values : held) {
      const auto is_it = [&](std::size_t i) { return i < plan_.names.size() && plan_.names[i] == values.held.name; };
      if (!is_it(tensor)) ++tensor;  // Most ranks have their tensors in the order of the plan.
      if (!is_it(tensor)) tensor = static_cast<std::size_t>(std::ranges::find(plan_.names, values.held.name) - plan_.names.begin());
      held_[tensor].push_back(std::move(values));
    }
    sent_bytes_ = 0;
    copy_own();
    choose(everything, timeout);
    exchange(timeout);
  } catch (const std::exception&) {  // Of any kind: the others wait for this rank.
    failure = handled_exception_text();
  }
  held_.clear();
  since_ = nullptr;
  std::vector<std::string> failures;
  try {
    failures = peers_->rendezvous(failure, timeout);
  } catch (const CommError& error) {
    failure_ = error.what();
    throw CommError(failure_ + ", during the " + said.what + (failure.empty() ? "" : "; here: " + failure));
  }
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (failures[rank].empty()) continue;
    failure_ = "rank " + std::to_string(rank) + ": " + failures[rank];
    throw CommError("transfer_plan: the " + said.what + " has failed on " + failure_);
  }
  if (since != nullptr) {
    since->state = SnapshotState::kKnown;
    since->last_run = runs_;
  }
}

std::vector<TransferMessage> PlannedTransfer::messages() const {
  std::vector<TransferMessage> messages;
  for (const auto& message : plan_.messages) {
    if (message.sender != peers_->rank() && message.receiver != peers_->rank()) continue;
    auto& shown = messages.emplace_back();
    shown.sender = message.sender;
    shown.receiver = message.receiver;
    for (const auto& [tensor, box, dtype] : message.boxes) {
      shown.boxes.push_back({.name = plan_.names[tensor], .offsets = box.offsets, .sizes = box.sizes, .dtype = dtype});
    }
  }
  return messages;
}

void PlannedTransfer::copy_own() const {
  for (const auto& own : plan_.own) {
    if (own.rank != peers_->rank()) continue;
    for (const auto& [into, common] : arrivals(own.box)) {
      const auto values = values_in(held_values(own.box), own.box.box.offsets, common);
      into.copy_(into.scalar_type() == own.box.dtype ? values : values.to(own.box.dtype));
    }
  }
}

/// Finds out what travels in this run. See [Counted first].
void PlannedTransfer::choose(bool everything, std::chrono::milliseconds timeout) {
  for (auto& round : rounds_) {
    for (auto* own : {&round.sent, &round.received}) {
      own->counts.clear();
      own->bytes = own->message == nullptr ? 0 : own->message->bytes;
    }
  }
  if (since_ == nullptr || everything) return;
  std::map<int, std::vector<ChangedCount>> told;  // by receiver
  for (const auto& [sent, received] : rounds_) {
    if (sent.message == nullptr) continue;
    for (std::size_t i = 0; i < sent.message->boxes.size(); ++i) {
      const auto& box = sent.message->boxes[i];
      told[sent.message->receiver].push_back(count_changed(box, travelling_values(box), since_->shards[sent.first_box + i]));
    }
  }
  const auto heard = tell_counts(told, timeout);
  std::map<int, std::size_t> next_told, next_heard;
  const auto take = [](OwnMessage& own, const std::vector<ChangedCount>& counts, std::size_t& next) {
    own.bytes = 0;
    for (const auto& box : own.message->boxes) {
      own.counts.push_back(counts[next++]);
      own.bytes += travelling_bytes(box, own.counts.back());
    }
  };
  for (auto& [sent, received] : rounds_) {
    if (sent.message != nullptr) take(sent, told.at(sent.message->receiver), next_told[sent.message->receiver]);
    if (received.message != nullptr) take(received, heard.at(received.message->sender), next_heard[received.message->sender]);
  }
}

/// Sends each receiver its counts, and returns those of each sender. Ranks at equal distance exchange theirs at once.
std::map<int, std::vector<ChangedCount>> PlannedTransfer::tell_counts(const std::map<int, std::vector<ChangedCount>>& told,
                                                                      std::chrono::milliseconds timeout) {
  std::map<int, std::vector<ChangedCount>> heard;
  for (const auto& round : rounds_) {
    if (const auto* message = round.received.message; message != nullptr) {
      auto& counts = heard[message->sender];
      counts.resize(counts.size() + message->boxes.size());
    }
  }
  const auto size = peers_->size();
  for (int distance = 1; distance < size; ++distance) {
    const auto to = told.find((peers_->rank() + distance) % size);
    const auto from = heard.find((peers_->rank() + size - distance) % size);
    Flight flight;
    if (from != heard.end()) {
      const auto numel = static_cast<std::int64_t>(from->second.size());
      flight.received.bytes = at::empty({numel}, at::TensorOptions(at::kInt).device(peers_->device())).view(at::kByte);
      flight.messages.push_back({.sends = false, .peer = from->first, .bytes = flight.received.bytes});
    }
    if (to != told.end()) {
      const auto counts = at::tensor(at::ArrayRef<ChangedCount>(to->second), at::kInt).to(peers_->device());
      flight.messages.push_back({.sends = true, .peer = to->first, .bytes = counts.view(at::kByte)});
    }
    if (flight.messages.empty()) continue;
    post(flight);
    wait(flight, timeout);
    if (from == heard.end()) continue;
    const auto counts = flight.received.bytes.view(at::kInt).cpu();
    std::copy_n(counts.const_data_ptr<ChangedCount>(), counts.numel(), from->second.begin());
  }
  return heard;
}

/// See [Two buffers].
void PlannedTransfer::exchange(std::chrono::milliseconds timeout) {
  std::vector<const Round*> rounds;
  std::int64_t largest = 0;
  for (const auto& round : rounds_) {
    if (round.sent.bytes + round.received.bytes > 0) rounds.push_back(&round);
    if (round.sent.bytes > 0 && !straight_source(round.sent).defined()) largest = std::max(largest, round.sent.bytes);
    if (round.received.bytes > 0 && !straight_target(round.received).defined()) largest = std::max(largest, round.received.bytes);
  }
  if (rounds.empty()) return;
  Buffers buffers(largest, peers_->device());
  auto flight = prepare(*rounds.front(), buffers);
  post(*flight);
  for (std::size_t i = 1; i <= rounds.size(); ++i) {
    const bool is_last = i == rounds.size();
    auto next = is_last ? std::nullopt : prepare(*rounds[i], buffers);
    wait(*flight, timeout);
    buffers.give_back(flight->sent.buffer);
    if (!next && !is_last) next = prepare(*rounds[i], buffers);
    const bool is_ahead = next.has_value();
    if (is_ahead) post(*next);
    unpack(*flight);
    buffers.give_back(flight->received.buffer);
    if (is_last) return;
    if (!is_ahead) {
      next = prepare(*rounds[i], buffers);
      post(*next);
    }
    flight = std::move(next);
  }
}

at::Tensor PlannedTransfer::Buffers::take() {
  ++taken_;
  if (free_.empty()) return at::empty({bytes_}, at::TensorOptions(at::kByte).device(device_));
  auto buffer = std::move(free_.back());
  free_.pop_back();
  return buffer;
}

void PlannedTransfer::Buffers::give_back(at::Tensor& buffer) {
  if (!buffer.defined()) return;
  --taken_;
  free_.push_back(std::move(buffer));
}

/// Packs what is sent, and finds memory for what is received. Nothing if there are too few buffers, of which it takes none then.
std::optional<PlannedTransfer::Flight> PlannedTransfer::prepare(const Round& round, Buffers& buffers) {
  Flight flight;
  flight.round = &round;
  const auto& [sent, received] = round;
  if (sent.bytes > 0) flight.sent.bytes = straight_source(sent);
  if (received.bytes > 0) flight.received.bytes = straight_target(received);
  const bool packs = sent.bytes > 0 && !flight.sent.bytes.defined();
  const bool unpacks = received.bytes > 0 && !flight.received.bytes.defined();
  if (buffers.left() < (packs ? 1 : 0) + (unpacks ? 1 : 0)) return std::nullopt;
  const auto stage = [&](Staged& staged, std::int64_t bytes) {
    staged.buffer = buffers.take();
    staged.bytes = staged.buffer.narrow(0, 0, bytes);
  };
  if (unpacks) stage(flight.received, received.bytes);
  if (received.bytes > 0) flight.messages.push_back({.sends = false, .peer = received.message->sender, .bytes = flight.received.bytes});
  if (sent.bytes == 0) return flight;
  if (packs) {
    stage(flight.sent, sent.bytes);
    pack(sent, flight.sent.bytes);
  } else if (since_ != nullptr) {
    save_values(flight.sent.bytes.view(sent.message->boxes.front().dtype), since_->shards[sent.first_box], since_->device);
  }
  flight.messages.push_back({.sends = true, .peer = sent.message->receiver, .bytes = flight.sent.bytes});
  return flight;
}

void PlannedTransfer::post(Flight& flight) {
  for (const auto& message : flight.messages) {
    flight.peers.push_back((message.sends ? "to rank " : "from rank ") + std::to_string(message.peer));
    if (message.sends) sent_bytes_ += static_cast<std::int64_t>(message.bytes.nbytes());
  }
  const auto both = flight.peers.front() + (flight.peers.size() == 1 ? "" : " and " + flight.peers.back());
  try {
    flight.waits = peers_->post(flight.messages);
  } catch (const std::exception&) {
    throw std::runtime_error("the messages " + both + ": " + handled_exception_text());
  }
  if (flight.waits.size() != flight.peers.size()) flight.peers.assign(flight.waits.size(), both);
}

void PlannedTransfer::wait(const Flight& flight, std::chrono::milliseconds timeout) {
  for (std::size_t i = 0; i < flight.waits.size(); ++i) {
    try {
      flight.waits[i](timeout);
    } catch (const std::exception&) {
      throw std::runtime_error("the message " + flight.peers[i] + ": " + handled_exception_text());
    }
  }
}

void PlannedTransfer::pack(const OwnMessage& own, const at::Tensor& bytes) {
  for_each_box(own, bytes, [&](std::size_t i, ChangedCount count, const at::Tensor& of_box) {
    const auto& box = own.message->boxes[i];
    auto* saved = since_ == nullptr ? nullptr : &since_->shards[own.first_box + i];
    if (count != kAllOfIt) return pack_changes(travelling_values(box), *saved, count, of_box);
    values_of(box, of_box).copy_(held_values(box));
    if (saved != nullptr) save_values(of_box.view(box.dtype), *saved, since_->device);
  });
}

void PlannedTransfer::unpack(const Flight& flight) const {
  if (!flight.received.buffer.defined()) return;
  const auto& own = flight.round->received;
  for_each_box(own, flight.received.bytes, [&](std::size_t i, ChangedCount count, const at::Tensor& of_box) {
    const auto& box = own.message->boxes[i];
    for (const auto& [into, common] : arrivals(box)) {
      if (count == kAllOfIt) {
        into.copy_(values_in(values_of(box, of_box), box.box.offsets, common));
      } else {
        place_changes(box, count, of_box, common, into);
      }
    }
  });
}

/// This rank's values of a box, as they travel: contiguous.
at::Tensor PlannedTransfer::travelling_values(const SentBox& box) const { return held_values(box).to(box.dtype).contiguous(); }

/// Where a box goes.
std::vector<PlannedTransfer::Arrival> PlannedTransfer::arrivals(const SentBox& box) const {
  std::vector<Arrival> found;
  for (const auto& [wanted, into] : targets_[box.tensor]) {
    if (wanted.dtype != box.dtype) continue;
    if (auto common = ckpt::intersection(box.box, wanted.box)) {
      found.push_back({.into = values_in(into, wanted.box.offsets, *common), .common = *std::move(common)});
    }
  }
  return found;
}

/// This rank's values of a box that it has, in their own dtype.
at::Tensor PlannedTransfer::held_values(const SentBox& box) const {
  for (const auto& [held, values] : held_[box.tensor]) {
    if (ckpt::intersection(held.box, box.box) == box.box) return values_in(values, held.box.offsets, box.box);
  }
  throw Error("transfer_plan: '" + plan_.names[box.tensor] + "' is no longer on this rank");
}

bool PlannedTransfer::is_straight(const at::Tensor& tensor, at::ScalarType dtype) const {
  return tensor.is_contiguous() && tensor.scalar_type() == dtype && tensor.device().type() == peers_->device().type();
}

/// The bytes from which a message can be sent without a buffer; undefined if there are none.
at::Tensor PlannedTransfer::straight_source(const OwnMessage& own) const {
  if (own.message->boxes.size() != 1 || own.count(0) != kAllOfIt) return {};
  const auto& box = own.message->boxes.front();
  const auto values = held_values(box);
  return is_straight(values, box.dtype) ? values.view({-1}).view(at::kByte) : at::Tensor();
}

/// The bytes into which a message can be received without a buffer; undefined if there are none.
at::Tensor PlannedTransfer::straight_target(const OwnMessage& own) const {
  if (own.message->boxes.size() != 1 || own.count(0) != kAllOfIt) return {};
  const auto& box = own.message->boxes.front();
  at::Tensor found;
  for (const auto& [wanted, into] : targets_[box.tensor]) {
    const auto common = wanted.dtype == box.dtype ? ckpt::intersection(box.box, wanted.box) : std::nullopt;
    if (!common) continue;
    if (found.defined() || *common != box.box) return {};
    found = values_in(into, wanted.box.offsets, box.box);
  }
  return is_straight(found, box.dtype) ? found.view({-1}).view(at::kByte) : at::Tensor();
}

}  // namespace fsdp::weights
