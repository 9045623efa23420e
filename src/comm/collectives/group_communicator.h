#pragma once

#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/collectives/call_events.h"
#include "comm/collectives/group.h"
#include "comm/collectives/transfers.h"
#include "comm/communicator.h"
#include "comm/traffic.h"

namespace fsdp::comm {

/// Pending's contract (idempotent, waits when destroyed) around the steps of a collective, whose header has been sent. A subclass is final
/// and calls settle() in its destructor. An exception in its steps makes all later collectives of the row fail, because peers may wait. In
/// a row of one rank, it ends only this collective, and start() or wait() rethrows it unchanged.
class GroupPending : public Pending {
 public:
  GroupPending(std::shared_ptr<Group> group, const Call& call, const Label& label)
      : group_(std::move(group)), call_(call), label_(label), events_(group_->events_source, call, label) {}
  void start();  ///< Call once, first.
  void wait() final;
  void wait_unconfirmed() final;

 protected:
  virtual void post() = 0;           ///< Starts the collective.
  virtual void finish() = 0;         ///< Waits for it and does the rest of the local work. Called once.
  virtual void forget() noexcept {}  ///< After a failure: releases messages in flight, so that the buffers are free.
  void settle() noexcept;
  /// Records that the data of the others have arrived. finish() calls it, if it knows the moment.
  void arrived() const noexcept { events_.record(events::EventKind::kArrived); }
  /// Calls `wait`, which makes the current stream of the device wait; see StreamTimes.
  void wait_on_stream(c10::Device device, const std::function<void()>& wait) {
    group_->stream_times.measure(device, events_.event(), wait);
  }
  const std::shared_ptr<Group> group_;
  const Call call_;

 private:
  enum class State { kStarted, kDone, kFailed };  // kStarted -> kFailed in start(); kStarted -> kDone | kFailed in wait().

  template <typename Compare>
  void wait_after(const Compare& compare);
  [[noreturn]] void fail();               ///< Throws CommError. Call it inside a catch block, or if group_->failed().
  [[noreturn]] void fail_by_exception();  ///< Call it inside a catch block.

  const Label label_;
  const CallEvents events_;
  State state_ = State::kStarted;
  std::string error_;
};

/// Control plane and error handling of communicators over c10d groups; collectives of tensors are the subclass's. See Group for the
/// backends.
class GroupCommunicator : public Communicator {
 public:
  GroupCommunicator(Row row, c10::intrusive_ptr<c10d::Backend> control, c10::intrusive_ptr<c10d::Backend> data,
                    std::shared_ptr<SharedRow> shared = nullptr, Group::Ends ends = Group::Ends::kElsewhere,
                    Group::Compares compares = Group::Compares::kFirst);
  ~GroupCommunicator() override;  ///< In debug mode, notifies the peers that this rank makes no more calls, and prints if they continue.

  int rank() const final { return group_->row.rank; }
  int size() const final { return group_->row.size(); }

  at::Tensor exchange(const at::Tensor& value, const Label& label) final;
  std::string broadcast(const std::string& text, int root, const Label& label) final;
  std::string gather(const std::string& text, const Label& label) final;
  void expect_equal(const std::string& text, const Label& label) final;
  void barrier() final;
  void confirm() final;
  void note_stream_times() final;
  std::uint32_t events_source() const final { return group_->events_source; }
  std::unique_ptr<Pending> all_gather(std::span<const GatherPart> parts, const Label& label) final;
  std::unique_ptr<Pending> reduce_scatter(std::span<const ReducePart> parts, double scale, const Label& label) final;
  std::unique_ptr<Pending> gather_uneven(std::span<const UnevenPart> parts, const std::vector<bool>& receives, const Label& label) final;
  std::unique_ptr<Pending> scatter(std::span<const ScatterPart> parts, int root, const Label& label) final;

 protected:
  virtual std::unique_ptr<GroupPending> make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) = 0;
  virtual std::unique_ptr<GroupPending> make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts,
                                                    double scale) = 0;
  virtual std::unique_ptr<GroupPending> make_uneven(const Call& call, const Label& label, std::span<const UnevenPart> parts,
                                                    const std::vector<bool>& receives) = 0;
  virtual std::unique_ptr<GroupPending> make_scatter(const Call& call, const Label& label, std::span<const ScatterPart> parts,
                                                     int root) = 0;

  /// What a rank whose gradients do not count sends in a reduction in which another rank sends `sent`. By default, nothing.
  virtual Sent sent_by_absent(const Sent& /*sent*/) const { return {}; }

  const std::shared_ptr<Group>& group() const { return group_; }

 private:
  /// Every collective starts here. `sizes` is a hash of everything else that must agree, in addition to label and bytes. Throws CommError
  /// if an earlier one failed, or (in debug mode) if the ranks are about to make different calls.
  Call begin(const Label& label, std::int64_t bytes, std::uint64_t sizes);
  at::Tensor exchange_now(const at::Tensor& value, int tag, const Call& call, const Label& label);
  void send(Transfers& transfers, const at::Tensor& bytes, int peer, int tag);
  void compare_calls(const Call& mine, const Label& label);

  const std::shared_ptr<Group> group_;
  const bool debug_;
  const int exceptions_at_construction_;
};

}  // namespace fsdp::comm
