#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/error.h"

namespace fsdp::comm {

/// The ranks of one row of a mesh, in order.
struct Row {
  std::string dim;                         ///< The mesh dimension along which the row runs.
  int rank = 0;                            ///< This rank's position in the row.
  std::vector<std::int64_t> global_ranks;  ///< One per position.
  std::int64_t world_size = 1;

  int size() const { return static_cast<int>(global_ranks.size()); }
};

/// What a communicator and its pending collectives share; the latter may live longer.
class Group {
 public:
  Group(Row row, c10::intrusive_ptr<c10d::Backend> backend) : row(std::move(row)), backend(std::move(backend)) {}

  /// Reserves `count` consecutive message numbers.
  std::uint32_t take_messages(std::size_t count) { return std::exchange(next_message_, next_message_ + static_cast<std::uint32_t>(count)); }

  /// The tag of a message number. Wraps far below c10d's limit of 2^31 - 1; by then the tag's former user is long complete.
  static int tag(std::uint32_t message) { return static_cast<int>(message & 0x3fffffff); }

  /// Turns the exception being handled into a CommError that names the collective, and makes every later collective of this group fail
  /// at once: after an aborted one, the ranks' messages no longer match. Call it inside a catch block.
  CommError failure(const Label& label);
  CommError failure(const Label& label, const std::string& text, const std::string& way_out);

  bool failed() const { return !first_failure_.empty(); }

  /// Throws CommError if an earlier collective failed; Error in a process that was forked from the one that made the group.
  void check_usable(const Label& label) const;
  void check_process(const Label& label) const;  ///< The latter alone.

  const Row row;
  const c10::intrusive_ptr<c10d::Backend> backend;  ///< Null in a row of one.

 private:
  const pid_t process_ = getpid();
  std::uint32_t next_message_ = 0;
  std::string first_failure_;
};

/// Pending's contract (idempotent, waits when destroyed) around the steps of a collective. A subclass is final and calls settle() in its
/// destructor.
class GroupPending : public Pending {
 public:
  GroupPending(std::shared_ptr<Group> group, const Label& label) : group_(std::move(group)), label_(label) {}
  void start();  ///< Call once, first.
  void wait() final;

 protected:
  virtual void post() = 0;           ///< Sends the collective on its way.
  virtual void finish() = 0;         ///< Waits for it and does the local rest. Called once.
  virtual void forget() noexcept {}  ///< After a failure: let go of messages in flight, so that the buffers are free.
  void settle() noexcept;
  const std::shared_ptr<Group> group_;

 private:
  enum class State { kStarted, kDone, kFailed };  // kStarted -> kFailed in start(); kStarted -> kDone | kFailed in wait().

  [[noreturn]] void fail();

  const Label label_;
  State state_ = State::kStarted;
  std::string error_;
};

/// Control plane and error handling of communicators over c10d groups. `control` carries small CPU messages (a Gloo group); collectives of
/// tensors are the subclass's. In a row of one, `control` is null and nothing is sent.
class GroupCommunicator : public Communicator {
 public:
  GroupCommunicator(Row row, c10::intrusive_ptr<c10d::Backend> control);
  ~GroupCommunicator() override;  ///< In debug mode, tells the peers that this rank makes no more calls, and prints if they go on.

  int rank() const final { return control_->row.rank; }
  int size() const final { return control_->row.size(); }

  at::Tensor exchange(const at::Tensor& value, const Label& label) final;
  void expect_equal(const std::string& text, const Label& label) final;
  void barrier() final;

 protected:
  /// Every collective starts here. Throws CommError if an earlier one failed, or (debug mode) if the ranks are about to do different
  /// things.
  void begin(const Label& label, std::int64_t bytes);

  const std::shared_ptr<Group>& control() const { return control_; }

 private:
  at::Tensor exchange_now(const at::Tensor& value, const Label& label);
  std::string broadcast(const std::string& text, std::int64_t length, int root, const Label& label);
  void compare_calls(const Label& label, std::int64_t bytes);

  const std::shared_ptr<Group> control_;
  const bool debug_;
  const int exceptions_at_construction_;
  std::uint64_t calls_ = 0;  // Only debug mode counts them.
};

}  // namespace fsdp::comm
