#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/call.h"
#include "comm/collectives/message_thread.h"
#include "comm/collectives/stream_times.h"
#include "comm/collectives/wait_notice.h"
#include "comm/communicator.h"
#include "comm/host_memory/shared_row.h"
#include "events/event_ring.h"
#include "events/row_name.h"
#include "fsdp/error.h"

namespace fsdp::comm {

class StoreProgress;

/// The ranks of one row of a mesh, in order.
struct Row {
  std::string dim;                         ///< The mesh dimension along which the row runs.
  int rank = 0;                            ///< This rank's position in the row.
  std::vector<std::int64_t> global_ranks;  ///< One per position.
  std::int64_t world_size = 1;
  std::shared_ptr<StoreProgress> progress = {};  ///< Exchanges the activities of ranks of different hosts; may be null.

  int size() const { return static_cast<int>(global_ranks.size()); }
  /// The global rank at a position. Messages name global ranks only, because those of a row differ from row to row.
  int global_rank(int position) const { return static_cast<int>(global_ranks[static_cast<std::size_t>(position)]); }
};

/// Returns a text such as "all-gather of unit 'blocks.0'".
std::string describe(const Label& label);

/// The state that a communicator shares with its pending collectives, which may exist longer than the communicator.
///
/// [Note: Ranks that diverge] Each collective begins with a header, sent to the next rank of the row, whose tag is only the collective's
/// number. A rank compares the headers that it gets with its own calls, in their order, before it waits for data. If ranks diverge, at
/// least one of them has a neighbour with a different call. This rank, like any rank for which a collective fails, first reports the reason
/// to all others (an alarm, for which they have posted a receive from the start), and then closes its connections. Ranks that wait for it
/// fail at once; ranks that wait for others fail when the StallWatch finds the alarm. Each of them forwards the alarm. Because the
/// connections are closed, nothing more is received, and all buffers are free. If all ranks share memory, they read all calls in each
/// other's mailboxes, and send no headers.
///
/// [Note: Headers beside a device] If a stream waits for data, and not the host, a host that waited for a header would leave its device
/// idle. In this case a thread compares the headers as they arrive. The host gets the outcome later: any call after a difference fails, and
/// compare_headers waits for the thread. Until then the device may compute with data of ranks that have diverged, or wait for sizes that
/// never arrive. It writes only into this rank's own buffers. On a difference, the thread does everything that the note above describes:
/// aborting the data group ends the waits of the device, and with them the wait of a host for its device. While no header is due, the
/// thread checks for alarms.
class Group {
 public:
  /// What shuts `data` down when it is no longer needed. Without a shutdown, NCCL's destructor aborts the group, which stops kernels in
  /// flight.
  enum class Ends {
    kWithGroup,  ///< By this class: on destruction, if no collective has failed.
    kElsewhere,  ///< By its owner, for example torch.distributed.
  };

  /// When headers are compared.
  enum class Compares {
    kFirst,  ///< Before the wait for data.
    kLate,   ///< Beside the wait: see the note. `data` makes streams wait, and not the host.
  };

  /// `control` (a Gloo group) carries headers, alarms and small CPU messages, `data` the tensors; they may be the same. In a row of one
  /// rank, `control` is null, and so is `data` if nothing is moved. `shared` has this rank's neighbours, all ranks of the row or some of
  /// them; null if there are none.
  Group(Row row, c10::intrusive_ptr<c10d::Backend> control, c10::intrusive_ptr<c10d::Backend> data,
        std::shared_ptr<SharedRow> shared = nullptr, Ends ends = Ends::kElsewhere, Compares compares = Compares::kFirst);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  /// Throws Error in a process that was forked from the rank.
  void check_process(const Label& label) const;

  /// Counts a collective. Throws CommError if an earlier one failed, and Error in a forked process.
  Call begin(const Label& label, std::int64_t bytes, std::uint64_t sizes);

  /// Starts sending the header, before the data. Throws CommError.
  void send_header(const Call& call, const Label& label);

  /// Compares the headers of all collectives up to this one with the neighbour's. Throws std::runtime_error, for failure().
  void compare_headers(const Call& call);
  /// Compares the headers of all collectives so far.
  void compare_headers();
  /// Compares them, if headers are compared first. Otherwise returns at once, unless this rank is far ahead of its neighbour.
  void compare_in_time(const Call& call);

  /// Waits for a message of `control`. Throws std::runtime_error, for failure().
  void wait(c10d::Work& work, int peer, const char* direction);

  /// Advances the collectives that this process has under way until `ready()` returns true, which the collective `number` needs (see
  /// advance_all_until); `shared` is not null. Throws std::runtime_error, for failure(), if a peer has ended that has not completed that
  /// collective, an alarm was raised, or the time-out has expired.
  void advance_until(std::uint64_t number, const std::function<bool()>& ready);

  /// True if a message from or to a peer can no longer be completed: the connection is closed, or some rank has raised an alarm. Any
  /// thread.
  bool is_hopeless(int peer);

  /// Turns the exception being handled into a CommError that names the collective, and makes every later collective of this row fail at
  /// once, on all ranks (see the note). If an earlier collective has failed, the error names that one. Call it inside a catch block, or if
  /// failed().
  CommError failure(const Label& label);

  bool failed() const { return failed_; }

  /// All ranks of the row share memory.
  bool is_one_host() const { return shared != nullptr && shared->size() == row.size(); }

  const Row row;
  const std::uint32_t events_source = events::new_source(events::name_of_row(row.dim, row.global_ranks));
  const c10::intrusive_ptr<c10d::Backend> control;
  const c10::intrusive_ptr<c10d::Backend> data;
  const std::shared_ptr<SharedRow> shared;
  const Compares compares;
  const std::shared_ptr<WaitNotice> notice;
  StreamTimes stream_times;  ///< Of the collectives on `data`.

 private:
  static constexpr std::int64_t kAlarmBytes = 1024;
  static constexpr std::size_t kUncomparedHeaders = 64;  // at most, of Compares::kLate

  struct Message {
    at::Tensor bytes;
    c10::intrusive_ptr<c10d::Work> work;
  };
  struct Header {
    Call mine;
    Message received;
    Message sent;
  };

  std::shared_ptr<StoreProgress> progress() const;
  void compare(Header& header);
  void compare_beside(Header& header) noexcept;
  void look_for_alarm() noexcept;
  Message receive(std::int64_t bytes, int peer, int tag);
  bool is_neighbour(int peer) const;
  int late_neighbour(std::uint64_t number) const;
  std::string last_call_of(int neighbour, std::uint64_t before) const;
  bool has_no_connection(int peer);
  bool is_closed(int peer);  // has no connection, or its process has ended
  bool has_alarm(int peer);
  bool has_alarm();  // of any peer; takes mutex_
  std::optional<std::string> received_alarm();
  std::vector<std::int64_t> ended_peers();  // the peers whose training has ended without a failure
  void raise_alarm(const std::string& text) noexcept;
  void close_connections() noexcept;
  void abort_data() noexcept;
  std::string describe_rank() const;

  const Ends ends_;
  const pid_t process_ = getpid();
  std::uint64_t calls_ = 0;
  std::deque<Header> headers_;      // Not compared yet.
  std::vector<Message> alarms_;     // One receive per peer; this rank's own is empty.
  std::vector<Message> sentinels_;  // One receive per peer. They end only when the connection ends.
  std::mutex mutex_;                // For alarms_ and sentinels_, which the StallWatch reads.
  std::mutex failure_mutex_;        // Orders failures.
  std::string first_failure_;       // Written before failed_ is.
  std::atomic<bool> failed_ = false;
  std::unique_ptr<MessageThread> beside_;  // Of Compares::kLate. The last: it uses the others.
};

}  // namespace fsdp::comm
