#pragma once

#include <cstdint>

#include "clock.h"

// What the host knows. Each of its threads has a clock of its own: what it has waited for, and what threads have told it that have waited.
// Threads tell each other by mutexes, condition variables and their end, which are seen because this library's functions of these names
// stand before the system's. So a thread that relies on another one's wait, and was not told of it, is found on every run.
namespace sim {

/// This thread's. A new thread knows what all others knew when it first asks. Under the lock.
const Clock& host_clock();
void host_learns(const Clock& clock);
void host_works(std::uint64_t duration);

/// One clock for all threads: what one has waited for, all know at once. Needed where threads tell each other by atomics alone
/// (std::future). It is the only one in programs that load the device late (Python), where the system's functions stand first, and with
/// sanitizers.
void use_one_host_clock(bool one);
bool hand_overs_are_seen();

/// The lock of all that the device keeps. Taking it tells nobody anything. Recursive, as allocations are operations, too.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

}  // namespace sim
