#include "fsdp/launch.h"

#include <ATen/Parallel.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/exception_text.h"
#include "base/process.h"
#include "comm/launch/descriptor.h"
#include "comm/launch/endings.h"
#include "comm/launch/launch.h"
#include "comm/launch/launch_report.h"
#include "comm/launch/rank_process.h"
#include "comm/launch/world.h"
#include "fsdp/error.h"

namespace fsdp {
namespace comm {
namespace {

[[noreturn]] void throw_errno(const std::string& what) { throw Error("launch_local: " + what + ": " + std::strerror(errno)); }

// A listening socket on a free port, handed to rank 0: choosing a port number and binding it later would be a race.
Descriptor listen_on_loopback(std::uint16_t& port) {
  Descriptor listening(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int fd = listening.get();
  if (fd < 0) throw_errno("socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(fd, SOMAXCONN) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw_errno("can't listen on 127.0.0.1");
  }
  port = ntohs(address.sin_port);
  return listening;
}

using Environment = std::vector<std::pair<std::string, std::string>>;

int threads_per_rank(int nproc) {
  cpu_set_t cores;
  const int count = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return std::max(1, count / nproc);
}

Environment rank_environment(int rank, int nproc, std::uint16_t port, int listen_fd) {
  Environment environment = {{"RANK", std::to_string(rank)},       {"WORLD_SIZE", std::to_string(nproc)},
                             {"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", std::to_string(nproc)},
                             {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", std::to_string(port)}};
  if (rank == 0) environment.emplace_back(kListenFd, std::to_string(listen_fd));
  if (std::getenv("OMP_NUM_THREADS") == nullptr) environment.emplace_back("OMP_NUM_THREADS", std::to_string(threads_per_rank(nproc)));
  return environment;
}

void write_report(int fd, char kind, const std::string& text) {
  const std::string report = kind + text;
  for (std::size_t done = 0; done < report.size();) {
    const ssize_t n = write(fd, report.data() + done, report.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // The parent has ended, so there is no process to report to.
    done += static_cast<std::size_t>(n);
  }
}

/// Calls `fn` and returns the exit code of the process. Throws for larger numbers, of which the system would keep the low eight bits only.
int exit_code_of(const std::function<int()>& fn) {
  const int code = fn();
  if (code < 0 || code > 255) throw Error("its function returned " + std::to_string(code) + "; exit codes are 0 to 255");
  return code;
}

std::string exit_code_text(int code) { return code == 0 ? "" : "its function returned " + std::to_string(code); }

// Leaves by _exit: exit handlers and static objects belong to the parent, which runs them itself.
[[noreturn]] void run_rank(const std::function<int()>& fn, int report_fd, const LaunchDetails& details) {
  int code = 1;
  // A pipe's reader gets lines as they are written, as a terminal's does. With a buffer of its own: in one that is in use already, as a
  // fork copies it, glibc goes on collecting.
  static std::array<char, BUFSIZ> lines;
  if (details.prefix_output) std::setvbuf(stdout, lines.data(), _IOLBF, lines.size());
  try {
    code = exit_code_of(fn);
    note_ending(code == 0 ? Ending::kReturned : Ending::kFailed, exit_code_text(code));
    write_report(report_fd, kReturned, std::to_string(code));
  } catch (const CommError& error) {
    note_ending(Ending::kFailed, error.what());
    write_report(report_fd, kPeerFailed, error.what());
  } catch (...) {
    note_ending(Ending::kFailed, current_exception_text());
    write_report(report_fd, kFailed, current_exception_text());
  }
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  _exit(code);
}

// Returns a text such as "rank 3", or "this rank" if the launcher's variables are invalid.
std::string own_name() {
  try {
    return "rank " + std::to_string(read_world(process_environment).rank);
  } catch (const Error&) {
    return "this rank";
  }
}

// In a process that another launcher started: its exit code is all that the launcher sees, so the message is printed here.
int run_here(const std::function<int()>& fn) {
  try {
    const int code = exit_code_of(fn);
    tell_ending(code == 0 ? Ending::kReturned : Ending::kFailed, exit_code_text(code));
    return code;
  } catch (...) {
    const auto text = current_exception_text();
    tell_ending(Ending::kFailed, text);
    if (is_first_to_say(text)) std::cerr << own_name() + " failed: " + text + "\n" << std::flush;
    return 1;
  }
}

std::vector<PrefixedStream> output_of(std::size_t rank, const LaunchDetails& details) {
  std::vector<PrefixedStream> output;
  if (!details.prefix_output) return output;
  for (const int target : {STDOUT_FILENO, STDERR_FILENO}) output.emplace_back(static_cast<int>(rank), target);
  return output;
}

/// Ends this process with its parent, however that ends (Ctrl-C, SIGTERM, SIGKILL): a rank must not outlive it.
void die_with_parent(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // It ended before the request above.
}

RankProcess fork_rank(const std::function<int()>& fn, const Environment& environment, int listen_fd, const LaunchDetails& details,
                      const std::vector<RankProcess>& earlier) {
  auto report = Pipe::open();
  auto output = output_of(earlier.size(), details);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) throw_errno("fork");
  if (pid == 0) {
    die_with_parent(parent);
    close(report.to_read.get());
    for (const RankProcess& other : earlier) close(other.report_fd);
    for (const auto& stream : output) stream.become_target();
    for (const auto& [name, value] : environment) {
      setenv(name.c_str(), value.c_str(), 1);
      // OpenMP read its variable when this program was loaded.
      if (name == "OMP_NUM_THREADS") at::set_num_threads(std::stoi(value));
    }
    if (environment.front().second != "0") close(listen_fd);  // Else clients of a dead rank 0 would still be let in.
    run_rank(fn, report.to_write.get(), details);
  }
  for (auto& stream : output) stream.close_write_end();
  return {
      .rank = static_cast<int>(earlier.size()), .pid = pid, .report_fd = report.to_read.take(), .report = {}, .output = std::move(output)};
}

void read_report(RankProcess& process) {
  char buffer[4096];
  const ssize_t n = read(process.report_fd, buffer, sizeof(buffer));
  if (n > 0) {
    process.report.append(buffer, static_cast<std::size_t>(n));
  } else if (n == 0 || errno != EINTR) {
    close(process.report_fd);
    process.report_fd = -1;
  }
}

// Data that a rank wrote may still be in the pipe after the rank has ended. A process that it left behind may hold the pipe open.
void read_rest(RankProcess& process) {
  if (process.report_fd < 0) return;
  fcntl(process.report_fd, F_SETFL, O_NONBLOCK);
  while (process.report_fd >= 0) read_report(process);
}

// Sleeps until a rank reports, writes or ends. The end of a rank closes its pipe, unless a process that it started keeps it open: hence a
// limit.
void wait_for_news(std::vector<RankProcess>& ranks) {
  std::vector<pollfd> fds;
  std::vector<std::function<void()>> readers;
  const auto watch = [&](int fd, std::function<void()> read) {
    fds.push_back({.fd = fd, .events = POLLIN, .revents = 0});
    readers.push_back(std::move(read));
  };
  bool ending = false;
  for (RankProcess& process : ranks) {
    if (process.report_fd >= 0) {
      watch(process.report_fd, [&process] { read_report(process); });
    } else {
      ending = ending || process.running;
    }
    for (auto& stream : process.output) {
      if (stream.fd() >= 0) watch(stream.fd(), [&stream] { stream.pass_on(); });
    }
  }
  poll(fds.data(), fds.size(), ending ? 1 : 100);
  for (std::size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].revents != 0) readers[i]();
  }
}

void signal_running(std::vector<RankProcess>& ranks, int signal) {
  for (RankProcess& process : ranks) {
    if (!process.running) continue;
    kill(process.pid, signal);
    process.stopped_by_us = true;
  }
}

// A guard. During its lifetime, SIGINT and SIGTERM to this process are passed on to the ranks, which may save their work before they end. A
// terminal sends Ctrl-C to the ranks, too, so they get it twice. A second Ctrl-C is for programs that hang: it ends this process, and with
// it the ranks.
class SignalForwarder {
 public:
  SignalForwarder() {
    for (auto& signal : signals) {
      signal.arrived = 0;
      signal.forwarded = false;
      struct sigaction action {};
      action.sa_handler = &note;
      sigaction(signal.number, &action, &signal.before);
    }
  }
  ~SignalForwarder() {
    for (const auto& signal : signals) sigaction(signal.number, &signal.before, nullptr);
  }
  SignalForwarder(const SignalForwarder&) = delete;
  SignalForwarder& operator=(const SignalForwarder&) = delete;

  void forward(const std::vector<RankProcess>& ranks) {
    for (auto& signal : signals) {
      if (signal.arrived == 0 || std::exchange(signal.forwarded, true)) continue;
      for (const RankProcess& process : ranks) {
        if (process.running) kill(process.pid, signal.number);
      }
    }
  }

  static bool any_arrived() {
    return std::any_of(signals.begin(), signals.end(), [](const Forwarded& signal) { return signal.arrived != 0; });
  }

  /// The signal by which all ranks that failed have ended, if it came by this process; else 0.
  static int ended_by(const std::vector<RankProcess*>& failures) {
    for (const auto& signal : signals) {
      const auto ended = [&](const RankProcess* process) {
        return WIFSIGNALED(process->status) && WTERMSIG(process->status) == signal.number;
      };
      if (signal.forwarded && !failures.empty() && std::all_of(failures.begin(), failures.end(), ended)) return signal.number;
    }
    return 0;
  }

 private:
  struct Forwarded {
    int number;
    volatile std::sig_atomic_t arrived = 0;
    volatile std::time_t first = 0;  // when it arrived
    bool forwarded = false;
    struct sigaction before {};
  };

  static void note(int number) {
    for (auto& signal : signals) {
      if (signal.number != number) continue;
      timespec now{};
      clock_gettime(CLOCK_MONOTONIC, &now);
      if (signal.arrived == 0) signal.first = now.tv_sec;
      // A signal that follows at once is the same one: timeout(1), for example, passes on a signal that its group has already got.
      if (number == SIGINT && signal.arrived != 0 && now.tv_sec - signal.first > 1) {
        sigaction(number, &signal.before, nullptr);
        raise(number);
      }
      signal.arrived = 1;
    }
  }

  static std::array<Forwarded, 2> signals;
};

std::array<SignalForwarder::Forwarded, 2> SignalForwarder::signals = {Forwarded{.number = SIGINT}, Forwarded{.number = SIGTERM}};

/// True if the rank has ended: then it no longer runs, and its report is complete.
bool has_ended(RankProcess& process) {
  const pid_t ended = waitpid(process.pid, &process.status, WNOHANG);
  if (ended == 0) return false;
  process.running = false;
  read_rest(process);
  for (auto& stream : process.output) stream.finish();
  // If the program ignores SIGCHLD, or collects all its children itself, only the rank's report shows how it has ended.
  process.collected_elsewhere = ended < 0;
  if (ended < 0) process.status = W_EXITCODE(process.returned() ? std::stoi(process.report.substr(1)) : 1, 0);
  return true;
}

// Waits for all ranks, and returns those that failed, in the order in which they ended.
std::vector<RankProcess*> supervise(std::vector<RankProcess>& ranks, SignalForwarder& signals, const LaunchDetails& details) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kNever = Clock::time_point::max();
  constexpr auto kTermToKill = std::chrono::seconds(2);
  std::vector<RankProcess*> failures;
  Clock::time_point next_signal = kNever;
  int signal = SIGTERM;
  const auto running = [](const RankProcess& process) { return process.running; };
  while (std::any_of(ranks.begin(), ranks.end(), running)) {
    wait_for_news(ranks);
    signals.forward(ranks);
    for (RankProcess& process : ranks) {
      if (!process.running || !has_ended(process) || !process.failed()) continue;
      failures.push_back(&process);
      if (next_signal == kNever) next_signal = Clock::now() + details.grace;
    }
    if (Clock::now() >= next_signal) {
      signal_running(ranks, signal);
      signal = SIGKILL;
      next_signal = Clock::now() + kTermToKill;
    }
  }
  return failures;
}

/// Ends ranks that were started before the start of another one failed, because they would wait for that one.
void abandon(std::vector<RankProcess>& ranks) {
  signal_running(ranks, SIGKILL);
  for (RankProcess& process : ranks) {
    while (waitpid(process.pid, &process.status, 0) < 0 && errno == EINTR) {
    }
    close(process.report_fd);
  }
}

/// Starts all ranks, or throws and leaves none running.
std::vector<RankProcess> start_ranks(int nproc, const std::function<int()>& fn, const LaunchDetails& details) {
  std::uint16_t port = 0;
  const Descriptor listening = listen_on_loopback(port);
  std::vector<RankProcess> ranks;
  try {
    for (int rank = 0; rank < nproc; ++rank) {
      const Environment environment = rank_environment(rank, nproc, port, listening.get());
      ranks.push_back(fork_rank(fn, environment, listening.get(), details, ranks));
    }
  } catch (...) {
    abandon(ranks);
    throw;
  }
  return ranks;
}

}  // namespace

bool is_single_threaded() {
#ifdef FSDP_THREAD_SANITIZER
  constexpr int kOwnThreads = 2;  // ThreadSanitizer's own thread takes care of itself in a fork.
#else
  constexpr int kOwnThreads = 1;
#endif
  using Tasks = std::filesystem::directory_iterator;
  std::error_code error;
  const Tasks tasks("/proc/self/task", error);
  if (error) throw Error("launch_local: can't count this process's threads: " + std::string(std::strerror(error.value())));
  return std::distance(tasks, Tasks()) <= kOwnThreads;
}

int launch_ranks(int nproc, const std::function<int()>& fn, const LaunchDetails& details) {
  if (fsdp::is_launched()) return run_here(fn);
  if (nproc < 1) throw Error("launch_local: nproc is " + std::to_string(nproc) + "; at least one rank is needed");
  prepare_process();  // The streams of ranks take the numbers of standard streams.
  if (!is_single_threaded()) {
    throw Error(
        "launch_local: this process runs several threads, whose locks would stay locked in forked ranks; call launch_local before the "
        "first tensor operation, or start the ranks with torchrun or mpirun");
  }
  if (details.max_restarts < 0) {
    throw Error("launch_local: max_restarts is " + std::to_string(details.max_restarts) + "; give 0 or more");
  }
  for (int restarts = 0;; ++restarts) {
    // A forked copy would print what is still buffered a second time.
    std::cout.flush();
    std::fflush(nullptr);
    std::vector<RankProcess> ranks = start_ranks(nproc, fn, details);
    int ended_by = 0;
    int result = 0;
    bool is_last = restarts == details.max_restarts;
    {
      SignalForwarder signals;
      const auto failures = supervise(ranks, signals, details);
      ended_by = signals.ended_by(failures);
      if (ended_by == 0) result = report_failures(ranks, failures, details.grace);
      is_last = is_last || signals.any_arrived();
    }
    if (ended_by != 0) raise(ended_by);  // The sender of a signal expects this of a program that does not handle it.
    if (result == 0 || is_last) return result;
    std::cerr << "launch_local: all ranks are started again (" + std::to_string(restarts + 1) + " of " +
                     std::to_string(details.max_restarts) + ")\n"
              << std::flush;
  }
}

}  // namespace comm

int launch_local(int nproc, const std::function<int()>& fn, LaunchOptions options) {
  try {
    return comm::launch_ranks(nproc, fn, {.prefix_output = options.prefix_output, .max_restarts = options.max_restarts});
  } catch (const Error& error) {
    std::cerr << std::string(error.what()) + "\n" << std::flush;
    return 1;
  }
}

bool is_launched() { return comm::is_launched(comm::process_environment); }

}  // namespace fsdp
