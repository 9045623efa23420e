#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

// A simulated accelerator, behind PrivateUse1. Its kernels run at once, on the CPU. What it checks is the order that streams and events
// would guarantee on a real one: streams, events, collectives and threads of the host have vector clocks, and each byte remembers its last
// accesses. So one run judges all schedules: an access that is not ordered behind an earlier one is reported, whether or not numbers are
// wrong. Beside that it counts kernels and waits of the host, and adds up simulated time.
//
//   streams.h     clocks of streams; launch() checks and notes what a kernel reads and writes
//   host_clock.h  clocks of threads
//   capture.h     which streams take part in the capture of a graph; graph.h: what it records, and replays
//   memory.h      a caching allocator by CUDA's rules, on addresses that the host cannot touch; pinned.h: pinned memory
//   operators.cpp, fallback.cpp    ATen's operators
//   collectives.h                  a c10d backend by NCCL's rules
namespace sim {

inline constexpr int kDevices = 8;
c10::Device device(int index = 0);

struct Options {
  bool uninitialized = false;   ///< Report kernels that read memory which nobody has written since it was allocated.
  bool judge_at_reuse = false;  ///< Freed memory must not be in use when it is used again, rather than when it is freed.
};
void set_options(const Options& options);

/// What is wrong, since the last call. Reports are collected, not thrown, because memory is freed in destructors. With SIM_TRACE=N in the
/// environment, the operation of number N (a report names numbers) shows its stack: runs are alike.
std::vector<std::string> take_reports();

/// A graph of what comes on the current device's current stream during a capture, by CUDA's rules; what breaks them is a report. A stream
/// that waits for what was put on a captured one takes part until the end, when the first one has to be behind all of them. Until then they
/// wait for nothing that was recorded outside, and the host does not wait for the device. What they allocate is of the graph's own pool,
/// from which nobody else gets memory until the graph has gone; other streams allocate nothing. A capture computes nothing: at its end, the
/// device's memory is as before. A replay computes all of it, in the order and at the addresses of the capture, and uses no memory of
/// others that was freed since.
class Graph {
 public:
  Graph();
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void begin_capture();
  void end_capture();
  /// On the current stream.
  void replay();
  void reset();

  struct Recorded;

 private:
  std::unique_ptr<Recorded> recorded_;
};

/// Runs before the host waits, in the waiting thread, with the reason as Stats names it. Empty: nothing does.
void before_host_wait(std::function<void(const std::string& reason)> hook);

struct Stats {
  std::map<std::string, std::int64_t> kernels;     ///< How many were launched, by operator.
  std::map<std::string, std::int64_t> host_waits;  ///< By reason.
  std::int64_t stream_waits = 0;
  std::int64_t allocations = 0;
  std::int64_t allocated = 0;  ///< Bytes, now.
  std::int64_t peak = 0;
  std::int64_t reserved = 0;

  std::int64_t all_kernels() const;
  std::int64_t all_host_waits() const;
};
Stats stats(int device = 0);
/// Memory that is allocated stays counted.
void reset_stats(int device = 0);

/// A model of time, in nanoseconds: to launch, of any kernel or collective, and for each byte that it reads or writes. Nothing by default.
struct Cost {
  std::uint64_t launch = 0;
  std::uint64_t kernel = 0;
  std::uint64_t collective = 0;
  double kernel_byte = 0;
  double collective_byte = 0;
};
void set_cost(const Cost& cost);
/// This thread's time.
std::uint64_t now();

}  // namespace sim
