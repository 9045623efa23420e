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
  std::shared_ptr<StoreProgress> progress = {};  ///< How ranks of different hosts tell each other what they do; may be null.

  int size() const { return static_cast<int>(global_ranks.size()); }
  /// The global rank at a position. Messages name global ranks only, because those of a row differ from row to row.
  int global_rank(int position) const { return static_cast<int>(global_ranks[static_cast<std::size_t>(position)]); }
};

/// Returns a text such as "all-gather of unit 'blocks.0'".
std::string describe(const Label& label);

/// The state that a communicator shares with its pending collectives, which may exist longer than the communicator.
///
/// [Note: Ranks that diverge]
/// Each collective begins with a header, sent to the next rank of the row, whose tag is the collective's number alone. A rank compares the
/// headers that it gets with its own calls, in their order, before it waits for data. Where ranks diverge, at least one of them has a
/// neighbour that does something else. This rank, like any rank for which a collective fails, first tells all others why (an alarm, for
/// which they have had a receive posted from the start), and then closes its connections. Who waits for it fails at once, who waits for
/// others when the StallWatch finds the alarm; each of them passes it on. As the connections are closed, nothing is received any more: all
/// buffers are free. Where all ranks share memory, they find the calls of all in each other's mailboxes, and send no headers.
///
/// [Note: Headers beside a device]
/// Where a stream waits for data, and not the host, a host that waited for a header would let its device run dry. There, a thread compares
/// the headers as they come, and the host learns the outcome from what it does next: any call after a difference fails, and compare_headers
/// waits for the thread. Until then the device may compute with what ranks that differ have sent each other, or wait for sizes that never
/// come. It writes nowhere but into this rank's own buffers. On a difference, the thread does all that the note above says: aborting the
/// data group ends what the device waits for, and with that the wait of a host for its device. While no header is due, the thread looks for
/// alarms.
class Group {
 public:
  /// Says what shuts `data` down when it is no longer needed. Without a shutdown, NCCL's destructor aborts the group, which stops kernels
  /// in flight.
  enum class Ends {
    kWithGroup,  ///< This class: on destruction, if no collective has failed.
    kElsewhere,  ///< Its owner, torch.distributed for example.
  };

  /// When headers are compared.
  enum class Compares {
    kFirst,  ///< Before data are waited for.
    kLate,   ///< Beside them: see the note. `data` makes streams wait, and not the host.
  };

  /// `control` (a Gloo group) carries headers, alarms and small CPU messages, `data` the tensors; they may be the same. In a row of one,
  /// `control` is null, and so is `data` where nothing is moved. `shared` has this rank's neighbours, all of the row or a part; null where
  /// there are none.
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
  /// The same of all collectives so far.
  void compare_headers();
  /// The same where they are compared first. Else returns at once, unless this rank is far ahead of its neighbour.
  void compare_in_time(const Call& call);

  /// Waits for a message of `control`. Throws std::runtime_error, for failure().
  void wait(c10d::Work& work, int peer, const char* direction);

  /// Advances what this process has under way until `ready()`, which the collective `number` needs (see advance_all_until); `shared` is not
  /// null. Throws std::runtime_error, for failure(), when a peer has gone that is not done with that collective, an alarm was raised, or
  /// the time-out is over.
  void advance_until(std::uint64_t number, const std::function<bool()>& ready);

  /// True when a message from or to a peer can't be completed any more: the connection is closed, or some rank has raised an alarm. Any
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
  std::vector<Message> sentinels_;  // The same. They end when the connection does, and never otherwise.
  std::mutex mutex_;                // Of the two, which the StallWatch looks at.
  std::mutex failure_mutex_;        // Who fails first.
  std::string first_failure_;       // Written before failed_ is.
  std::atomic<bool> failed_ = false;
  std::unique_ptr<MessageThread> beside_;  // Of Compares::kLate. The last: it uses the others.
};

}  // namespace fsdp::comm
