#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace fsdp::comm {

/// A background thread for blocking receives, because Gloo can't report whether a message has arrived. It is used for collectives that
/// advance in shared memory, for gathers that overlap with the program, and for headers while a device computes. Each row has a thread of
/// its own. Collectives of a row begin in the same order on all ranks, so earlier ones never wait for later ones. Thread-safe.
class MessageThread {
 public:
  /// `look`, if it is not empty, is called a few times a second while the thread has nothing to wait for. It must not throw.
  explicit MessageThread(std::function<void()> look = {});
  ~MessageThread();  ///< `look` is no longer called. The thread ends by itself when it has nothing to wait for.
  MessageThread(const MessageThread&) = delete;
  MessageThread& operator=(const MessageThread&) = delete;

  /// Makes the thread call `wait`, after the functions that were added before. It must not throw. `key` identifies it for remove().
  void add(const void* key, std::function<void()> wait);
  /// When this returns, the function of that key is not running and will not be called. Idempotent.
  void remove(const void* key);
  /// Returns when the function of that key has been called, or has been removed.
  void wait_for(const void* key);
  /// Returns when all added functions except the newest ones, of this number, have been called.
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
