#include "comm/group_communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <sstream>
#include <type_traits>

#include "base/exception_text.h"
#include "base/stable_hash.h"
#include "comm/pieces.h"
#include "comm/transfers.h"

namespace fsdp::comm {
namespace {

/// What a rank is about to do: compared by all ranks of the row in debug mode. Sent as bytes, between processes of one build.
struct Call {
  std::uint64_t number = 0;
  std::int64_t bytes = 0;
  char operation[48] = {};
  char unit[192] = {};

  bool operator==(const Call&) const = default;
};

constexpr Label kEndOfTraining = {.operation = "end of training", .unit = {}};

std::string describe(const Label& label) {
  std::string text = label.operation;
  if (!label.unit.empty()) text.append(" of unit '").append(label.unit).append("'");
  return text;
}

std::string describe(const Call& call, bool with_bytes) {
  std::string text = "#" + std::to_string(call.number) + " " + describe(Label{.operation = call.operation, .unit = call.unit});
  if (with_bytes) text += " (" + std::to_string(call.bytes) + " bytes)";
  return text;
}

std::string describe_rank(const Row& row) {
  std::string text = "rank " + std::to_string(row.rank) + " of " + std::to_string(row.size());
  if (row.size() != row.world_size) {
    text += " of '" + row.dim + "' (global rank " + std::to_string(row.global_ranks[static_cast<std::size_t>(row.rank)]) + ")";
  }
  return text;
}

const char* way_out(const std::string& c10d_text) {
  if (c10d_text.find("imed out") != std::string::npos || c10d_text.find("imeout") != std::string::npos) {
    return "A peer did not take part in time: see whether it failed or does something else (FSDP_DEBUG=1 compares every collective), or "
           "raise MeshOptions::timeout.";
  }
  return "A peer has failed or left: its own message says why.";
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
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

CommError Group::failure(const Label& label) {
  const std::string text = current_exception_text();
  return failure(label, text, way_out(text));
}

CommError Group::failure(const Label& label, const std::string& text, const std::string& way_out) {
  CommError error(describe(label) + " on " + describe_rank(row) + " failed: " + text + ". " + way_out);
  if (first_failure_.empty()) first_failure_ = error.what();
  return error;
}

// The child has the sockets, but none of the threads that serve them: it would wait for ever.
void Group::check_process(const Label& label) const {
  if (!backend || getpid() == process_) return;
  throw Error(describe(label) + ": this process was forked from " + describe_rank(row) +
              " after the mesh was made, and has none of its connections. Use mesh and model in the rank alone, or fork before "
              "init_device_mesh.");
}

void Group::check_usable(const Label& label) const {
  check_process(label);
  if (!failed()) return;
  throw CommError(describe(label) + " on " + describe_rank(row) +
                  " was not started, because an earlier collective failed: " + first_failure_);
}

void GroupPending::start() {
  try {
    post();
  } catch (...) {
    fail();
  }
}

void GroupPending::wait() {
  if (state_ == State::kDone) return;
  if (state_ == State::kFailed) throw CommError(error_);
  group_->check_process(label_);
  try {
    finish();
    state_ = State::kDone;
  } catch (...) {
    fail();
  }
}

void GroupPending::fail() {
  state_ = State::kFailed;
  const CommError error = group_->failure(label_);
  error_ = error.what();
  forget();
  throw error;
}

void GroupPending::settle() noexcept {
  try {
    wait();
  } catch (...) {
    // Whoever destroys an unfinished collective does not want its result; the group remembers the failure.
  }
}

GroupCommunicator::GroupCommunicator(Row row, c10::intrusive_ptr<c10d::Backend> control)
    : control_(std::make_shared<Group>(std::move(row), std::move(control))),
      debug_(debug_requested() && size() > 1),
      exceptions_at_construction_(std::uncaught_exceptions()) {}

GroupCommunicator::~GroupCommunicator() {
  // A rank that is failing leaves without a word: its peers see the closed connection.
  if (!debug_ || control_->failed() || std::uncaught_exceptions() > exceptions_at_construction_) return;
  try {
    begin(kEndOfTraining, 0);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
}

void GroupCommunicator::begin(const Label& label, std::int64_t bytes) {
  control_->check_usable(label);
  if (debug_) compare_calls(label, bytes);
}

at::Tensor GroupCommunicator::exchange(const at::Tensor& value, const Label& label) {
  begin(label, static_cast<std::int64_t>(value.nbytes()));
  return exchange_now(value, label);
}

at::Tensor GroupCommunicator::exchange_now(const at::Tensor& value, const Label& label) {
  std::vector<std::int64_t> shape = {size()};
  shape.insert(shape.end(), value.sizes().begin(), value.sizes().end());
  const std::int64_t numel = value.numel();
  at::Tensor all = at::empty(shape, value.options());
  if (numel == 0) return all;
  std::memcpy(static_cast<char*>(all.mutable_data_ptr()) + static_cast<std::size_t>(rank()) * value.nbytes(), value.const_data_ptr(),
              value.nbytes());
  if (size() == 1) return all;
  try {
    const int tag = Group::tag(control_->take_messages(1));
    Transfers transfers(control_->backend);
    for (int k = 1; k < size(); ++k) {
      const int peer = (rank() + k) % size();
      transfers.receive(flat_view(all, peer * numel, numel), peer, tag);
    }
    for (int k = 1; k < size(); ++k) transfers.send(flat_view(value, 0, numel), (rank() + size() - k) % size(), tag);
    transfers.wait_receives();
    transfers.wait_sends();
  } catch (...) {
    throw control_->failure(label);
  }
  stats_.control_bytes += (size() - 1) * static_cast<std::int64_t>(value.nbytes());
  return all;
}

std::string GroupCommunicator::broadcast(const std::string& text, std::int64_t length, int root, const Label& label) {
  at::Tensor buffer = at::zeros({std::max<std::int64_t>(length, 1)}, at::kByte);
  char* bytes = static_cast<char*>(buffer.mutable_data_ptr());
  if (rank() == root) std::memcpy(bytes, text.data(), text.size());
  try {
    const int tag = Group::tag(control_->take_messages(1));
    Transfers transfers(control_->backend);
    if (rank() != root) {
      transfers.receive(buffer, root, tag);
    } else {
      for (int peer = 0; peer < size(); ++peer) {
        if (peer != root) transfers.send(buffer, peer, tag);
      }
      stats_.control_bytes += (size() - 1) * buffer.numel();
    }
    transfers.wait_receives();
    transfers.wait_sends();
  } catch (...) {
    throw control_->failure(label);
  }
  return {bytes, static_cast<std::size_t>(length)};
}

void GroupCommunicator::expect_equal(const std::string& text, const Label& label) {
  begin(label, 0);
  if (size() == 1) return;
  at::Tensor mine = at::empty({2}, at::kLong);
  mine.mutable_data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(stable_hash(text));
  mine.mutable_data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(text.size());
  const at::Tensor all = exchange_now(mine, label);
  const std::int64_t* facts = all.const_data_ptr<std::int64_t>();
  for (int other = 1; other < size(); ++other) {
    const std::int64_t* fact = facts + 2 * other;
    if (fact[0] == facts[0] && fact[1] == facts[1]) continue;
    const std::string first = broadcast(text, facts[1], 0, label);
    const std::string second = broadcast(text, fact[1], other, label);
    throw Error(describe(label) + ": rank 0 and rank " + std::to_string(other) +
                (size() < control_->row.world_size ? " of '" + control_->row.dim + "'" : "") +
                " differ. Every rank must build the same model and pass the same options." + first_differences(first, second, 0, other));
  }
}

void GroupCommunicator::barrier() {
  constexpr Label kBarrier = {.operation = "barrier", .unit = {}};
  begin(kBarrier, 0);
  if (size() > 1) exchange_now(at::zeros({1}, at::kByte), kBarrier);
}

void GroupCommunicator::compare_calls(const Label& label, std::int64_t bytes) {
  static_assert(std::has_unique_object_representations_v<Call>, "compared and sent as bytes");
  Call mine;
  mine.number = ++calls_;
  mine.bytes = bytes;
  std::string_view(label.operation).copy(mine.operation, sizeof(mine.operation) - 1);
  label.unit.copy(mine.unit, sizeof(mine.unit) - 1);
  at::Tensor record = at::empty({static_cast<std::int64_t>(sizeof(Call))}, at::kByte);
  std::memcpy(record.mutable_data_ptr(), &mine, sizeof(Call));
  const at::Tensor all = exchange_now(record, label);
  std::vector<Call> calls(static_cast<std::size_t>(size()));
  std::memcpy(calls.data(), all.const_data_ptr(), all.nbytes());
  const auto other = std::find_if(calls.begin() + 1, calls.end(), [&](const Call& call) { return call != calls[0]; });
  if (other == calls.end()) return;
  Call same_size = *other;
  same_size.bytes = calls[0].bytes;
  const bool only_bytes_differ = same_size == calls[0];
  throw control_->failure(label,
                          "the ranks make different calls: rank 0: " + describe(calls[0], only_bytes_differ) + "; rank " +
                              std::to_string(other - calls.begin()) + ": " + describe(*other, only_bytes_differ),
                          "All ranks must run the same steps on the same units in the same order.");
}

}  // namespace fsdp::comm
