#include "comm/collectives/stall_watch.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/process.h"
#include "comm/collectives/group.h"
#include "events/event_ring.h"

namespace fsdp::comm {

class StallWatch::Thread {
 public:
  void add(StallWatch& wait) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_.push_back(&wait);
    if (!std::exchange(runs_, true)) std::thread(&Thread::run, this).detach();
  }

  void remove(StallWatch& wait) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_.erase(std::find(waits_.begin(), waits_.end(), &wait));
  }

 private:
  [[noreturn]] void run() {
    for (;;) {
      std::this_thread::sleep_for(kInterval);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!waits_.empty()) events::note_alive();
      for (StallWatch* wait : waits_) {
        // A wait that has only begun may yet find its message complete.
        if (std::exchange(wait->seen_, true) && wait->group_.is_hopeless(wait->peer_)) wait->work_.abort();
        if (!wait->told_ && WaitNotice::is_due(wait->begin_)) {
          wait->told_ = true;
          WaitNotice::tell(wait->group_.notice, wait->peer_, wait->begin_);
        }
      }
    }
  }

  static constexpr std::chrono::milliseconds kInterval{200};

  std::mutex mutex_;
  std::vector<StallWatch*> waits_;
  bool runs_ = false;
};

StallWatch::Thread& StallWatch::thread() { return of_this_process<Thread>(); }

StallWatch::StallWatch(Group& group, c10d::Work& work, int peer) : group_(group), work_(work), peer_(peer) { thread().add(*this); }

StallWatch::~StallWatch() { thread().remove(*this); }

}  // namespace fsdp::comm
