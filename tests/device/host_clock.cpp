#include "host_clock.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>

namespace sim {
namespace {

std::recursive_mutex& device_mutex() {
  static auto* const mutex = new std::recursive_mutex;  // Tensors are freed when the program ends, too.
  return *mutex;
}

struct HandOvers {
  std::atomic_flag locked = ATOMIC_FLAG_INIT;  // A mutex would be seen as one that tells.
  std::unordered_map<const void*, Clock> by_mutex;
  std::map<pthread_t, Clock> by_ended_thread;
  Clock all;                            // what any thread knows
  std::atomic<bool> are_seen = false;   // once a mutex has been
  std::atomic<bool> one_clock = false;  // asked for
  std::atomic<bool> any = false;        // there is something to tell
};

HandOvers& hand_overs() {
  static auto* const made = new HandOvers;
  return *made;
}

class SpinLock {
 public:
  SpinLock() {
    while (hand_overs().locked.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~SpinLock() { hand_overs().locked.clear(std::memory_order_release); }
  SpinLock(const SpinLock&) = delete;
  SpinLock& operator=(const SpinLock&) = delete;
};

/// Mutexes are taken inside of hand-overs, and when a thread has no clock any more.
enum class Telling { kYes, kNo };
thread_local Telling telling = Telling::kYes;

struct OfThread {
  Clock clock;
  OfThread() {
    const SpinLock lock;
    clock = hand_overs().all;
  }
  ~OfThread() {
    telling = Telling::kNo;
    const SpinLock lock;
    hand_overs().by_ended_thread[pthread_self()] = clock;
  }
};

Clock& own_clock() {
  thread_local OfThread own;
  return own.clock;
}

bool has_one_clock() { return !hand_overs().are_seen || hand_overs().one_clock; }

Clock& clock_of_this_thread() {
  hand_overs().any = true;
  return has_one_clock() ? hand_overs().all : own_clock();
}

#ifndef FSDP_SANITIZED
/// fn(this thread's clock), unless it is not to tell anything here.
template <typename Fn>
void hand_over(const void* mutex, const Fn& fn) {
  auto& state = hand_overs();
  state.are_seen.store(true, std::memory_order_relaxed);
  if (!state.any || telling == Telling::kNo || mutex == &device_mutex()) return;
  telling = Telling::kNo;
  Clock& own = own_clock();
  {
    const SpinLock lock;
    fn(own);
  }
  telling = Telling::kYes;
}

void tell(const void* mutex) {
  hand_over(mutex, [mutex](const Clock& own) {
    if (!own.knows_nothing()) hand_overs().by_mutex[mutex].join(own);
  });
}

void learn(const void* mutex) {
  hand_over(mutex, [mutex](Clock& own) {
    const auto told = hand_overs().by_mutex.find(mutex);
    if (told != hand_overs().by_mutex.end()) own.join(told->second);
  });
}

void learn_of_ended(pthread_t thread) {
  hand_over(nullptr, [thread](Clock& own) {
    const auto told = hand_overs().by_ended_thread.find(thread);
    if (told == hand_overs().by_ended_thread.end()) return;
    own.join(told->second);
    hand_overs().by_ended_thread.erase(told);
  });
}

/// The system's function of this name.
template <typename Function>
Function* the_systems(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}
#endif

}  // namespace

const Clock& host_clock() { return clock_of_this_thread(); }

void host_learns(const Clock& clock) {
  clock_of_this_thread().join(clock);
  const SpinLock lock;
  hand_overs().all.join(clock);
}

void host_works(std::uint64_t duration) { clock_of_this_thread().pass(duration); }

void use_one_host_clock(bool one) { hand_overs().one_clock = one; }
bool hand_overs_are_seen() { return hand_overs().are_seen; }

Lock::Lock() { device_mutex().lock(); }
Lock::~Lock() { device_mutex().unlock(); }

}  // namespace sim

#ifndef FSDP_SANITIZED
extern "C" {

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  static auto* const lock = sim::the_systems<int(pthread_mutex_t*)>("pthread_mutex_lock");
  const int result = lock(mutex);
  sim::learn(mutex);
  return result;
}

int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  static auto* const trylock = sim::the_systems<int(pthread_mutex_t*)>("pthread_mutex_trylock");
  const int result = trylock(mutex);
  if (result == 0) sim::learn(mutex);
  return result;
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  static auto* const unlock = sim::the_systems<int(pthread_mutex_t*)>("pthread_mutex_unlock");
  sim::tell(mutex);
  return unlock(mutex);
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  static auto* const wait = sim::the_systems<int(pthread_cond_t*, pthread_mutex_t*)>("pthread_cond_wait");
  sim::tell(mutex);
  const int result = wait(condition, mutex);
  sim::learn(mutex);
  return result;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  static auto* const wait = sim::the_systems<int(pthread_cond_t*, pthread_mutex_t*, const timespec*)>("pthread_cond_timedwait");
  sim::tell(mutex);
  const int result = wait(condition, mutex, until);
  sim::learn(mutex);
  return result;
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  static auto* const wait = sim::the_systems<int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*)>("pthread_cond_clockwait");
  sim::tell(mutex);
  const int result = wait(condition, mutex, clock, until);
  sim::learn(mutex);
  return result;
}

int pthread_join(pthread_t thread, void** value) {
  static auto* const join = sim::the_systems<int(pthread_t, void**)>("pthread_join");
  const int result = join(thread, value);
  if (result == 0) sim::learn_of_ended(thread);
  return result;
}

}  // extern "C"
#endif
