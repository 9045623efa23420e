#include "events/program_stack.h"

#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <string>

namespace fsdp::events {
namespace {

constexpr int kMostFrames = 128;

pid_t writer = 0;                       // The process that writes its stacks; a forked one has a file of its own.
volatile sig_atomic_t descriptor = -1;  // of the file, for the handler

void write_line(int file, std::string_view text) {
  // If it can't be written, only the process that asked gets no stack.
  [[maybe_unused]] const auto written = write(file, text.data(), text.size());
  [[maybe_unused]] const auto ended = write(file, "\n", 1);
}

/// The handler. What it calls takes no memory: backtrace() has been called before, which loads what it needs.
void write_stack(int signal) {
  const int error = errno;
  const auto process = getpid();
  if (syscall(SYS_gettid) != process) {
    syscall(SYS_tgkill, process, process, signal);  // The main thread is the one that trains.
  } else if (const int file = descriptor; file >= 0) {
    std::array<void*, kMostFrames> frames{};
    const int count = backtrace(frames.data(), kMostFrames);
    write_line(file, kNativeStack);
    backtrace_symbols_fd(frames.data(), count, file);
    write_line(file, kEndOfStack);
  }
  errno = error;
}

bool may_have_signal(int number) {
  struct sigaction now = {};
  return sigaction(number, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 &&
         (now.sa_handler == SIG_DFL || now.sa_handler == &write_stack);
}

}  // namespace

void write_stack_when_asked() noexcept {
  const int number = SIGRTMAX - 3;  // Programs use the signals that have names.
  if (writer == getpid() || !may_have_signal(number)) return;
  const int made = memfd_create(kStackFile, MFD_CLOEXEC);
  if (made < 0) return;
  const int file = fcntl(made, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);  // The program may have closed its streams.
  close(made);
  if (file < 0) return;
  write_line(file, std::to_string(number));
  std::array<void*, 1> frame{};
  backtrace(frame.data(), static_cast<int>(frame.size()));
  writer = getpid();
  if (descriptor >= 0) close(descriptor);  // the parent's
  descriptor = file;
  struct sigaction writing = {};
  writing.sa_handler = &write_stack;
  writing.sa_flags = SA_RESTART;  // Calls of the program continue as if there had been no signal.
  sigaction(number, &writing, nullptr);
}

}  // namespace fsdp::events
