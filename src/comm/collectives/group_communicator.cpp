#include "comm/collectives/group_communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <numeric>

#include "base/classic_stream.h"
#include "base/exception_text.h"
#include "base/stable_hash.h"
#include "comm/parts.h"

namespace fsdp::comm {
namespace {

constexpr Label kEndOfTraining = {.operation = "end of training", .unit = {}};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  ClassicStream<std::istringstream> stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string first_differences(const std::string& a, const std::string& b, int rank_a, int rank_b) {
  constexpr int kShown = 3;
  const auto lines_a = lines_of(a);
  const auto lines_b = lines_of(b);
  std::string text;
  int shown = 0;
  for (std::size_t i = 0; i < std::max(lines_a.size(), lines_b.size()) && shown < kShown; ++i) {
    const std::string line_a = i < lines_a.size() ? "'" + lines_a[i] + "'" : "(no such line)";
    const std::string line_b = i < lines_b.size() ? "'" + lines_b[i] + "'" : "(no such line)";
    if (line_a == line_b) continue;
    text += "\n  line " + std::to_string(i + 1) + ": rank " + std::to_string(rank_a) + " has " + line_a + ", rank " +
            std::to_string(rank_b) + " has " + line_b;
    ++shown;
  }
  return text;
}

bool debug_requested() {
  const char* value = std::getenv("FSDP_DEBUG");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

}  // namespace

void GroupPending::start() {
  events_.record(events::EventKind::kPosted);
  try {
    post();
  } catch (...) {
    fail_by_exception();
  }
}

void GroupPending::wait() {
  wait_after([this] { group_->compare_headers(call_); });
}

void GroupPending::wait_unconfirmed() {
  wait_after([this] { group_->compare_in_time(call_); });
}

template <typename Compare>
void GroupPending::wait_after(const Compare& compare) {
  if (state_ == State::kDone) return;
  if (state_ == State::kFailed) throw CommError(error_);
  group_->check_process(label_);
  if (group_->failed()) fail();  // Fails even if all data have arrived, so that all ranks see the same result.
  events_.record(events::EventKind::kWaitBegan);
  try {
    compare();
    finish();
  } catch (...) {
    fail_by_exception();
  }
  if (group_->failed()) fail();  // Found meanwhile by the thread that compares.
  state_ = State::kDone;
  events_.record(events::EventKind::kWaitEnded);
}

void GroupPending::fail() {
  state_ = State::kFailed;
  events_.record(events::EventKind::kFailed);
  const CommError error = group_->failure(label_);
  error_ = error.what();
  forget();
  throw error;
}

void GroupPending::fail_by_exception() {
  if (group_->row.size() > 1) fail();
  // No peer waits for this collective, and later ones do not depend on it.
  state_ = State::kFailed;
  events_.record(events::EventKind::kFailed);
  error_ = describe(label_) + " failed: " + current_exception_text();
  forget();
  throw;
}

void GroupPending::settle() noexcept {
  try {
    wait_unconfirmed();
  } catch (...) {
    // The result of an unfinished collective that is destroyed is not needed; the group remembers the failure.
  }
}

GroupCommunicator::GroupCommunicator(Row row, c10::intrusive_ptr<c10d::Backend> control, c10::intrusive_ptr<c10d::Backend> data,
                                     std::shared_ptr<SharedRow> shared, Group::Ends ends, Group::Compares compares)
    : group_(std::make_shared<Group>(std::move(row), std::move(control), std::move(data), std::move(shared), ends, compares)),
      debug_(debug_requested() && size() > 1),
      exceptions_at_construction_(std::uncaught_exceptions()) {}

GroupCommunicator::~GroupCommunicator() {
  // A rank that is failing sends nothing here: its peers see the closed connection.
  if (!debug_ || group_->failed() || std::uncaught_exceptions() > exceptions_at_construction_) return;
  try {
    compare_calls(group_->begin(kEndOfTraining, 0, 0), kEndOfTraining);
  } catch (const std::exception& error) {
    std::cerr << std::string(error.what()) + "\n" << std::flush;
  }
}

Call GroupCommunicator::begin(const Label& label, std::int64_t bytes, std::uint64_t sizes) {
  const Call call = group_->begin(label, bytes, sizes);
  if (debug_) compare_calls(call, label);
  group_->send_header(call, label);
  return call;
}

void GroupCommunicator::note_stream_times() {
  group_->stream_times.note();  // A device may at first report that it has not reached the event, although it has.
  while (group_->stream_times.note()) {
  }
}

at::Tensor GroupCommunicator::exchange(const at::Tensor& value, const Label& label) {
  const Call call = begin(label, static_cast<std::int64_t>(value.nbytes()), static_cast<std::uint64_t>(value.scalar_type()));
  const BlockingCallEvents events(group_->events_source, call, label);
  return exchange_now(value, tags::data(call, 0), call, label);
}

// The exchange proceeds in rounds. In each one, a rank that has the values of n ranks, counted from itself, sends them to the rank n places
// before it, and receives n more. This takes as many bytes as messages between all pairs, but only log2(size) messages.
at::Tensor GroupCommunicator::exchange_now(const at::Tensor& value, int tag, const Call& call, const Label& label) {
  std::vector<std::int64_t> shape = {size()};
  shape.insert(shape.end(), value.sizes().begin(), value.sizes().end());
  const std::int64_t numel = value.numel();
  const auto of_round = [&](int have) { return std::min(have, size() - have) * numel; };
  at::Tensor from_own;  // this rank's first, then the next one's, ...
  Transfers transfers(*group_);
  try {
    from_own = at::empty(shape, value.options());
    if (numel > 0) std::memcpy(from_own.mutable_data_ptr(), value.const_data_ptr(), value.nbytes());
    if (size() == 1) return from_own;
    for (int have = 1; have < size() && numel > 0; have *= 2) {
      transfers.receive(flat_view(from_own, have * numel, of_round(have)), (rank() + have) % size(), tag);
    }
    std::size_t round = 0;
    for (int have = 1; have < size() && numel > 0; have *= 2) {
      transfers.wait_receives(round++);
      send(transfers, flat_view(from_own, 0, of_round(have)), (rank() + size() - have) % size(), tag);
      if (have == 1) group_->compare_headers(call);
    }
    if (numel == 0) group_->compare_headers(call);
    transfers.wait_receives();
    transfers.wait_sends();
    at::Tensor all = at::empty(shape, value.options());
    const auto* bytes = static_cast<const char*>(from_own.const_data_ptr());
    const auto nbytes = static_cast<std::ptrdiff_t>(value.nbytes());
    std::rotate_copy(bytes, bytes + (size() - rank()) * nbytes, bytes + size() * nbytes, static_cast<char*>(all.mutable_data_ptr()));
    return all;
  } catch (...) {
    throw group_->failure(label);
  }
}

/// A message that CommStats counts.
void GroupCommunicator::send(Transfers& transfers, const at::Tensor& bytes, int peer, int tag) {
  transfers.send(bytes, peer, tag);
  stats_.control_bytes += static_cast<std::int64_t>(bytes.nbytes());
  ++stats_.control_messages;
}

// The text is sent down a tree. With numbers counted from the root, a rank receives it from the rank whose number lacks the lowest set bit.
// There are as many messages as if the root sent all of them, but no rank sends more than log2(size).
std::string GroupCommunicator::broadcast(const std::string& text, int root, const Label& label) {
  const Call call = begin(label, 0, static_cast<std::uint64_t>(root));
  const BlockingCallEvents events(group_->events_source, call, label);
  if (size() == 1) return text;
  const int own = (rank() - root + size()) % size();
  // Ranks [own, own + below), as far as they exist, receive it from this rank, directly or through others.
  const int below = own == 0 ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(size()))) : own & -own;
  const auto rank_at = [&](int number) { return (number + root) % size(); };
  std::string received = text;
  Transfers transfers(*group_);
  const auto pass_on = [&](const at::Tensor& buffer, std::size_t message) {
    const int tag = tags::data(call, message);
    if (own != 0) transfers.receive(buffer, rank_at(own - below), tag);
    group_->compare_headers(call);
    transfers.wait_receives();
    for (int child = below / 2; child > 0; child /= 2) {
      if (own + child < size()) send(transfers, buffer, rank_at(own + child), tag);
    }
  };
  try {
    const at::Tensor length = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
    pass_on(length, 0);
    received.resize(static_cast<std::size_t>(length.const_data_ptr<std::int64_t>()[0]));
    const auto bytes = at::from_blob(received.data(), {static_cast<std::int64_t>(received.size())}, at::kByte);
    if (!received.empty()) pass_on(bytes, 1);
    transfers.wait_sends();
  } catch (...) {
    throw group_->failure(label);
  }
  return received;
}

// Each rank sends one message to rank 0, which needs the texts. To send fewer messages, ranks would have to collect texts on the way. Rank
// 0 would receive as many bytes, and most texts would be sent several times, through the memory of ranks that do not need them.
std::string GroupCommunicator::gather(const std::string& text, const Label& label) {
  const auto lengths = exchange(at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong), label);
  const Call call = begin(label, 0, 0);
  const BlockingCallEvents events(group_->events_source, call, label);
  if (size() == 1) return text;
  const int tag = tags::data(call, 0);
  const std::span of_ranks(lengths.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(size()));
  std::string all = text;
  Transfers transfers(*group_);
  try {
    if (rank() == 0) all.resize(static_cast<std::size_t>(std::accumulate(of_ranks.begin(), of_ranks.end(), std::int64_t{0})));
    const auto bytes = at::from_blob(all.data(), {static_cast<std::int64_t>(all.size())}, at::kByte);
    auto begin = static_cast<std::int64_t>(text.size());
    for (int peer = 1; peer < size() && rank() == 0; ++peer) {
      const auto length = of_ranks[static_cast<std::size_t>(peer)];
      if (length > 0) transfers.receive(flat_view(bytes, begin, length), peer, tag);
      begin += length;
    }
    if (rank() != 0 && !text.empty()) send(transfers, bytes, 0, tag);
    group_->compare_headers(call);
    transfers.wait_receives();
    transfers.wait_sends();
  } catch (...) {
    throw group_->failure(label);
  }
  return rank() == 0 ? all : std::string();
}

void GroupCommunicator::expect_equal(const std::string& text, const Label& label) {
  const Call call = begin(label, 0, 0);
  const BlockingCallEvents events(group_->events_source, call, label);
  if (size() == 1) return;
  at::Tensor mine = at::empty({2}, at::kLong);
  mine.mutable_data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(stable_hash(text));
  mine.mutable_data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(text.size());
  const at::Tensor all = exchange_now(mine, tags::data(call, 0), call, label);
  const std::int64_t* facts = all.const_data_ptr<std::int64_t>();
  for (int other = 1; other < size(); ++other) {
    const std::int64_t* fact = facts + 2 * other;
    if (fact[0] == facts[0] && fact[1] == facts[1]) continue;
    const std::string first = broadcast(text, 0, label);
    const std::string second = broadcast(text, other, label);
    const int rank_a = group_->row.global_rank(0);
    const int rank_b = group_->row.global_rank(other);
    throw Error(describe(label) + ": rank " + std::to_string(rank_a) + " and rank " + std::to_string(rank_b) +
                " differ. Every rank must build the same model and pass the same options." +
                first_differences(first, second, rank_a, rank_b));
  }
}

void GroupCommunicator::barrier() {
  constexpr Label kBarrier = {.operation = "barrier", .unit = {}};
  const Call call = begin(kBarrier, 0, 0);
  const BlockingCallEvents events(group_->events_source, call, kBarrier);
  exchange_now(at::zeros({1}, at::kByte), tags::data(call, 0), call, kBarrier);
}

void GroupCommunicator::confirm() {
  if (group_->compares != Group::Compares::kLate) return;  // Each wait has.
  constexpr Label kConfirm = {.operation = "comparison of the collectives so far", .unit = {}};
  group_->check_process(kConfirm);
  try {
    group_->compare_headers();
  } catch (...) {
    throw group_->failure(kConfirm);
  }
}

void GroupCommunicator::compare_calls(const Call& mine, const Label& label) {
  at::Tensor record = at::empty({static_cast<std::int64_t>(sizeof(Call))}, at::kByte);
  std::memcpy(record.mutable_data_ptr(), &mine, sizeof(Call));
  // Headers of earlier calls are compared in passing. They agree, because all ranks have come to this call.
  const at::Tensor all = exchange_now(record, tags::comparison(mine.number), mine, label);
  std::vector<Call> calls(static_cast<std::size_t>(size()));
  std::memcpy(calls.data(), all.const_data_ptr(), all.nbytes());
  const auto other = std::find_if(calls.begin() + 1, calls.end(), [&](const Call& call) { return call != calls[0]; });
  if (other == calls.end()) return;
  try {
    const auto& row = group_->row;
    throw RowFailure(describe_divergence(calls[0], row.global_rank(0), *other, row.global_rank(static_cast<int>(other - calls.begin()))));
  } catch (...) {
    throw group_->failure(label);
  }
}

std::unique_ptr<Pending> GroupCommunicator::all_gather(std::span<const GatherPart> parts, const Label& label) {
  const std::int64_t bytes = check_parts(parts, size());
  auto pending = make_gather(begin(label, bytes, sizes_of(parts)), label, parts);
  pending->start();
  const auto [wire, shared_memory] = traffic().sent(bytes, bytes);
  stats_.all_gather_bytes += wire + shared_memory;
  stats_.shared_memory_bytes += shared_memory;
  ++stats_.all_gathers;
  return pending;
}

std::unique_ptr<Pending> GroupCommunicator::reduce_scatter(std::span<const ReducePart> parts, double scale, const Label& label) {
  const std::int64_t bytes = check_parts(parts, *this);
  auto pending = make_reduce(begin(label, bytes, sizes_of(parts)), label, parts, scale);
  pending->start();
  const Sent sent = sent_in_reduction(traffic(), parts, bytes);
  const auto [wire, shared_memory] = gives(parts, rank()) ? sent : sent_by_absent(sent);
  stats_.reduce_scatter_bytes += wire + shared_memory;
  stats_.shared_memory_bytes += shared_memory;
  ++stats_.reduce_scatters;
  return pending;
}

std::unique_ptr<Pending> GroupCommunicator::gather_uneven(std::span<const UnevenPart> parts, const std::vector<bool>& receives,
                                                          const Label& label) {
  const std::int64_t bytes = check_parts(parts, receives, *this);
  auto pending = make_uneven(begin(label, 0, sizes_of(parts, receives)), label, parts, receives);
  pending->start();
  stats_.all_gather_bytes += bytes;
  if (group_->is_one_host()) stats_.shared_memory_bytes += bytes;
  ++stats_.all_gathers;
  return pending;
}

std::unique_ptr<Pending> GroupCommunicator::scatter(std::span<const ScatterPart> parts, int root, const Label& label) {
  const std::int64_t bytes = check_parts(parts, root, *this);
  // The ranks' shards differ in size.
  auto pending = make_scatter(begin(label, 0, mix(parts.size(), static_cast<std::uint64_t>(root))), label, parts, root);
  pending->start();
  stats_.scatter_bytes += bytes;
  ++stats_.scatters;
  return pending;
}

}  // namespace fsdp::comm
