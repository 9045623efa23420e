#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace fsdp::comm {

/// A thread that waits for messages where others must not, since Gloo does not tell whether a message has come: for collectives that
/// advance in shared memory, for gathers beside a program that does something else, and for headers where a device goes on meanwhile. Each
/// row has one of its own: its collectives begin in the same order on all ranks, so that those in front never wait for those behind.
/// Thread-safe.
class MessageThread {
 public:
  /// `look`, if there is one, is called some times a second while the thread has nothing to wait for. It must not throw.
  explicit MessageThread(std::function<void()> look = {});
  ~MessageThread();  ///< `look` is not called any more. The thread ends on its own when it has nothing to wait for.
  MessageThread(const MessageThread&) = delete;
  MessageThread& operator=(const MessageThread&) = delete;

  /// Has the thread call `wait`, after those that were added before. It must not throw. `key` identifies it for remove().
  void add(const void* key, std::function<void()> wait);
  /// When this returns, the function of that key is not running and will not be called. Idempotent.
  void remove(const void* key);
  /// Returns when the function of that key has been called, or has been removed.
  void wait_for(const void* key);
  /// Returns when all that were added have been called, but for so many of the newest.
  void wait_for_all_but(std::size_t newest);

 private:
  struct Waiting {
    const void* key;
    std::function<void()> wait;
  };
  // Shared with the thread, which may outlive this object.
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Waiting> waiting;  // the first is under way
    std::function<void()> look;
    bool looks = false;  // now
    bool ended = false;
  };
  static void run(const std::shared_ptr<Queue>& queue);

  const pid_t process_ = getpid();  // A forked child has the queue, but not the thread.
  const std::shared_ptr<Queue> queue_;
};

}  // namespace fsdp::comm
