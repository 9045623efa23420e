#include "comm/collectives/group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/exception_text.h"
#include "comm/collectives/stall_watch.h"
#include "comm/collectives/store_progress.h"
#include "comm/host_memory/progress.h"
#include "comm/launch/endings.h"
#include "events/activity.h"
#include "events/event_ring.h"

namespace fsdp::comm {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kNotedText = 2048;  // of an error, in events

const char* way_out(const std::string& c10d_text) {
  if (c10d_text.find("imed out") != std::string::npos || c10d_text.find("imeout") != std::string::npos) {
    return "A peer did not take part in time: see whether it failed or does something else (FSDP_DEBUG=1 compares every collective), or "
           "raise MeshOptions::timeout.";
  }
  return "That rank has failed or ended: see its own message, if there is one. FSDP_DEBUG=1 compares every collective.";
}

at::Tensor bytes_of(const Call& call) {
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(sizeof(Call))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &call, sizeof(Call));
  return bytes;
}

c10::intrusive_ptr<c10d::Work> send_bytes(c10d::Backend& backend, const Row& row, const at::Tensor& bytes, int peer, int tag) {
  std::vector<at::Tensor> argument = {bytes};
  try {
    return backend.send(argument, peer, tag);
  } catch (...) {
    throw std::runtime_error(current_exception_text() + " (sending to rank " + std::to_string(row.global_rank(peer)) + ")");
  }
}

// True if a work whose wait was aborted has completed nevertheless, because the message was about to complete.
bool is_complete(c10d::Work& work) {
  try {
    return work.wait(milliseconds(1));
  } catch (...) {
    return false;
  }
}

}  // namespace

std::string describe(const Label& label) { return label.operation + of_unit(label.unit); }

Group::Group(Row row, c10::intrusive_ptr<c10d::Backend> control, c10::intrusive_ptr<c10d::Backend> data, std::shared_ptr<SharedRow> shared,
             Ends ends, Compares compares)
    : row(std::move(row)),
      control(std::move(control)),
      data(std::move(data)),
      shared(std::move(shared)),
      compares(this->control == nullptr ? Compares::kFirst : compares),
      notice(std::make_shared<WaitNotice>(this->row.global_ranks, this->row.rank, events_source, progress())),
      ends_(ends) {
  events::keep_in_file_if_asked(this->row.global_ranks[static_cast<std::size_t>(this->row.rank)], this->row.world_size);
  if (this->control == nullptr) return;
  for (int peer = 0; peer < this->row.size(); ++peer) {
    const bool own = peer == this->row.rank;
    alarms_.push_back(own ? Message{} : receive(kAlarmBytes, peer, tags::kAlarm));
    sentinels_.push_back(own ? Message{} : receive(1, peer, tags::kSentinel));
  }
  if (this->compares == Compares::kLate) beside_ = std::make_unique<MessageThread>([this] { look_for_alarm(); });
  const auto is_whole = [this] {
    for (int peer = 0; peer < this->row.size(); ++peer) {
      if (peer != this->row.rank && is_hopeless(peer)) return false;
    }
    return true;
  };
  if (progress() == nullptr) return;
  progress()->answer(events_source, is_whole);
}

Group::~Group() {
  if (progress() != nullptr) progress()->stop_answering(events_source);
  if (beside_ != nullptr) beside_->wait_for_all_but(0);  // The neighbour has what this rank has sent.
  if (ends_ == Ends::kElsewhere || data == nullptr || failed() || getpid() != process_) return;
  try {
    data->shutdown();
  } catch (...) {  // It is no longer needed.
  }
}

/// How it hears of ranks of other hosts; null if all are on this one.
std::shared_ptr<StoreProgress> Group::progress() const { return control == nullptr || is_one_host() ? nullptr : row.progress; }

Group::Message Group::receive(std::int64_t bytes, int peer, int tag) {
  std::vector<at::Tensor> argument = {at::empty({bytes}, at::kByte)};
  try {
    auto work = control->recv(argument, peer, tag);
    return {std::move(argument[0]), std::move(work)};
  } catch (...) {
    throw std::runtime_error(current_exception_text() + " (receiving from rank " + std::to_string(row.global_rank(peer)) + ")");
  }
}

// The child has the sockets, but none of the threads that serve them: it would wait for ever.
void Group::check_process(const Label& label) const {
  if (control == nullptr || getpid() == process_) return;
  throw Error(describe(label) + ": this process was forked from " + describe_rank() +
              " after the mesh was made, and has none of its connections. Use mesh and model in the rank alone, or fork before "
              "init_device_mesh.");
}

Call Group::begin(const Label& label, std::int64_t bytes, std::uint64_t sizes) {
  check_process(label);
  if (failed()) {
    throw CommError(describe(label) + " on " + describe_rank() +
                    " was not started, because an earlier collective failed: " + first_failure_);
  }
  return make_call(++calls_, label, bytes, sizes);
}

void Group::send_header(const Call& call, const Label& label) {
  if (control == nullptr) return;
  const int next = (row.rank + 1) % row.size();
  const int previous = (row.rank + row.size() - 1) % row.size();
  try {
    if (shared != nullptr) {
      advance_until(call.number - 1, [this] { return shared->has_room(); });
      shared->publish(call);
    }
    if (is_one_host()) return;
    Header header{.mine = call, .received = receive(sizeof(Call), previous, tags::header(call.number)), .sent = {bytes_of(call), {}}};
    header.sent.work = send_bytes(*control, row, header.sent.bytes, next, tags::header(call.number));
    if (beside_ == nullptr) {
      headers_.push_back(std::move(header));
    } else {
      auto kept = std::make_shared<Header>(std::move(header));
      beside_->add(kept.get(), [this, kept] { compare_beside(*kept); });
    }
  } catch (...) {
    throw failure(label);
  }
}

void Group::compare_headers(const Call& call) {
  if (shared != nullptr) advance_until(call.number, [&] { return shared->compare(call.number); });
  if (is_one_host()) return;
  if (beside_ != nullptr) return compare_headers();  // None is later.
  while (!headers_.empty() && headers_.front().mine.number <= call.number) {
    compare(headers_.front());
    headers_.pop_front();
  }
}

void Group::compare_headers() {
  if (beside_ == nullptr) return;
  beside_->wait_for_all_but(0);
  if (failed()) throw RowFailure(first_failure_);
}

void Group::compare_in_time(const Call& call) {
  if (beside_ == nullptr) return compare_headers(call);
  beside_->wait_for_all_but(kUncomparedHeaders);
}

void Group::compare(Header& header) {
  const int next = (row.rank + 1) % row.size();
  const int previous = (row.rank + row.size() - 1) % row.size();
  wait(*header.received.work, previous, "receiving from");
  Call theirs;
  std::memcpy(&theirs, header.received.bytes.const_data_ptr(), sizeof(Call));
  if (theirs != header.mine)
    throw RowFailure(describe_divergence(header.mine, row.global_rank(row.rank), theirs, row.global_rank(previous)));
  wait(*header.sent.work, next, "sending to");
}

/// On the thread.
void Group::compare_beside(Header& header) noexcept {
  if (failed()) return;
  try {
    compare(header);
  } catch (...) {
    failure({.operation = header.mine.operation, .unit = header.mine.unit});
  }
}

/// Called on the thread. Ranks with a header that is due notice a difference by it; other ranks may wait for their device, which waits for
/// a rank that has ended.
void Group::look_for_alarm() noexcept {
  if (failed() || !has_alarm()) return;
  try {
    throw std::runtime_error("Connection closed by peer");
  } catch (...) {
    failure({.operation = "what the device waits for", .unit = {}});
  }
}

void Group::advance_until(std::uint64_t number, const std::function<bool()>& ready) {
  const auto begin = std::chrono::steady_clock::now();
  bool told = false;
  const auto is_done = [&](int peer) { return shared->is_done(peer - shared->first(), number); };
  const auto look = [&]() -> std::optional<std::string> {
    events::note_alive();
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int peer = 0; peer < row.size(); ++peer) {
      if (peer == row.rank || !is_closed(peer)) continue;
      // A rank of another host that has left may have done all that others need. A rank that still needs something from it raises an alarm.
      if ((!is_neighbour(peer) || is_done(peer)) && !has_alarm(peer)) continue;
      return "Connection closed by peer (waiting for rank " + std::to_string(row.global_rank(peer)) + ")";
    }
    if (!told && WaitNotice::is_due(begin)) {
      told = true;
      if (const int late = late_neighbour(number); late >= 0) WaitNotice::tell(notice, late, begin, last_call_of(late, number));
    }
    if (std::chrono::steady_clock::now() - begin < shared->timeout()) return std::nullopt;
    const std::string text = "Timed out waiting " + std::to_string(shared->timeout().count()) + "ms";
    const int late = late_neighbour(number);
    return late < 0 ? text : text + " (receiving from rank " + std::to_string(row.global_rank(late)) + ")";
  };
  comm::advance_all_until(shared->host_memory(), ready, look);
}

/// A rank that has not made the call yet, and not one that also waits for that rank; -1 if all are done with it.
int Group::late_neighbour(std::uint64_t number) const {
  int late = -1;
  const auto has_come = [&](int peer) { return shared->call_of(peer - shared->first(), number) != nullptr; };
  for (int peer = shared->first() + shared->size() - 1; peer >= shared->first(); --peer) {
    if (peer == row.rank || shared->is_done(peer - shared->first(), number)) continue;
    if (late < 0 || !has_come(peer) || has_come(late)) late = peer;
  }
  return late;
}

/// The last call before this one that a neighbour has made.
std::string Group::last_call_of(int neighbour, std::uint64_t before) const {
  // Its mailbox has all calls of which others may need something.
  constexpr std::uint64_t kLookedAt = 16;
  for (std::uint64_t number = before; number > 0 && number + kLookedAt > before; --number) {
    const Call* const call = shared->call_of(neighbour - shared->first(), number);
    if (call != nullptr) return events::call_text(call->operation, call->unit);
  }
  return {};
}

void Group::wait(c10d::Work& work, int peer, const char* direction) {
  std::string text = "Connection closed by peer";
  try {
    const StallWatch watch(*this, work, peer);
    if (work.wait() || is_complete(work)) return;
  } catch (...) {
    text = current_exception_text();
  }
  throw std::runtime_error(text + " (" + direction + " rank " + std::to_string(row.global_rank(peer)) + ")");
}

bool Group::is_hopeless(int peer) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed(peer)) return true;
  }
  return has_alarm();
}

bool Group::has_alarm() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int peer = 0; peer < row.size(); ++peer) {
    if (has_alarm(peer)) return true;
  }
  return false;
}

bool Group::is_neighbour(int peer) const { return shared != nullptr && peer >= shared->first() && peer < shared->first() + shared->size(); }

bool Group::is_closed(int peer) { return has_no_connection(peer) || (is_neighbour(peer) && shared->has_ended(peer - shared->first())); }

// A wait that is aborted returns false at once, or throws the exception that has ended the connection.
bool Group::has_no_connection(int peer) {
  c10d::Work& work = *sentinels_[static_cast<std::size_t>(peer)].work;
  try {
    work.abort();
    work.wait();
    return false;
  } catch (...) {
    return true;
  }
}

// A rank sends its alarm before it closes the connection. Once the connection is closed, the alarm has arrived, or never will, which is an
// exception.
bool Group::has_alarm(int peer) {
  if (peer == row.rank || !has_no_connection(peer)) return false;
  c10d::Work& work = *alarms_[static_cast<std::size_t>(peer)].work;
  try {
    work.abort();
    work.wait();
    return true;
  } catch (...) {
    return false;
  }
}

std::optional<std::string> Group::received_alarm() {
  const std::lock_guard<std::mutex> lock(mutex_);
  // When a connection ends, Gloo's thread ends the waits for it, one by one. Another receive must not be posted before it has ended all.
  for (int peer = 0; peer < static_cast<int>(alarms_.size()); ++peer) {
    if (peer == row.rank) continue;
    try {
      receive(1, peer, tags::kSentinel);
    } catch (...) {
    }
  }
  for (int peer = 0; peer < static_cast<int>(alarms_.size()); ++peer) {
    if (has_alarm(peer)) return std::string(static_cast<const char*>(alarms_[static_cast<std::size_t>(peer)].bytes.const_data_ptr()));
  }
  return std::nullopt;
}

CommError Group::failure(const Label& label) {
  const std::string start = describe(label) + " on " + describe_rank() + " failed";
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failed()) return CommError(start + ", because an earlier collective failed: " + first_failure_);
  std::string text;   // the text of the error
  std::string alarm;  // the text for the other ranks
  try {
    throw;
  } catch (const RowFailure& failure) {
    text = alarm = failure.what();
  } catch (...) {
    if (const auto received = received_alarm()) {
      text = alarm = *received;
    } else {
      text = current_exception_text();
      const auto ended = ended_peers();
      text.append(". ").append(ended.empty() ? way_out(text) : describe_ended(ended));
    }
  }
  CommError error(start + ": " + text);
  first_failure_ = error.what();
  events::record({.source = events_source,
                  .unit = events::name_of(label.unit),
                  .operation = events::name_of(first_failure_.substr(0, kNotedText)),
                  .kind = events::EventKind::kGivenUp});
  failed_ = true;
  if (shared != nullptr) shared->revoke();
  raise_alarm(alarm.empty() ? "another rank failed first: " + first_failure_ : alarm);
  close_connections();
  abort_data();
  return error;
}

// The alarm that follows also informs the other ranks.
std::vector<std::int64_t> Group::ended_peers() {
  std::vector<std::int64_t> gone;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int peer = 0; peer < static_cast<int>(sentinels_.size()); ++peer) {
      if (peer != row.rank && is_closed(peer)) gone.push_back(row.global_ranks[static_cast<std::size_t>(peer)]);
    }
  }
  return returned_among(gone);
}

void Group::raise_alarm(const std::string& text) noexcept {
  try {
    at::Tensor bytes = at::zeros({kAlarmBytes}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), text.data(), std::min(text.size(), static_cast<std::size_t>(kAlarmBytes - 1)));
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int peer = 0; peer < static_cast<int>(alarms_.size()); ++peer) {
      if (peer == row.rank) continue;
      try {
        works.push_back(send_bytes(*control, row, bytes, peer, tags::kAlarm));
      } catch (...) {  // That rank has ended.
      }
    }
    for (const auto& work : works) {
      try {
        work->wait(milliseconds(1000));  // The receive is posted, so only a machine that hangs takes long.
      } catch (...) {
      }
    }
  } catch (...) {  // The others see a closed connection.
  }
}

// c10d has no call for this, but Gloo closes all connections of a group when a wait times out.
void Group::close_connections() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Message& sentinel : sentinels_) {
    if (sentinel.work == nullptr) continue;
    try {
      sentinel.work->wait(milliseconds(1));
    } catch (...) {
    }
  }
}

/// Aborts collectives that the device has begun. A peer that failed does not take part in them, and they could still write into buffers
/// that are used for something else by then.
void Group::abort_data() noexcept {
  if (data == control) return;
  try {
    data->abort();
  } catch (...) {  // A backend without abort() has no such collectives.
  }
}

std::string Group::describe_rank() const {
  const auto text = "rank " + std::to_string(row.global_rank(row.rank)) + " of " + std::to_string(row.world_size);
  return row.size() == row.world_size ? text : text + " (one of " + std::to_string(row.size()) + " of '" + row.dim + "')";
}

}  // namespace fsdp::comm
