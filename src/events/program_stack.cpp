#include "events/program_stack.h"

#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <string>

namespace fsdp::events {
namespace {

constexpr int kMostFrames = 128;

/// Of the process that has made it; a forked one makes its own.
struct StackFile {
  pid_t process = 0;
  std::string path;
};
// Never destroyed, as the handler may run until the process ends.
StackFile& stack_file() {
  static StackFile& file = *new StackFile();
  return file;
}
volatile sig_atomic_t descriptor = -1;  // of it, for the handler

void write_line(int file, std::string_view text) {
  // What can't be written is missed by who asks, and by nobody else.
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

void remove_file() {
  const auto& file = stack_file();
  std::error_code none;
  if (file.process == getpid()) std::filesystem::remove(file.path, none);
}

bool may_have_signal(int number) {
  struct sigaction now = {};
  return sigaction(number, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 &&
         (now.sa_handler == SIG_DFL || now.sa_handler == &write_stack);
}

}  // namespace

void write_stack_when_asked(const std::filesystem::path& folder) noexcept {
  const int number = SIGRTMAX - 3;  // Programs use the signals that have names.
  auto& file = stack_file();
  if (file.process == getpid() || !may_have_signal(number)) return;
  try {
    const auto path = folder / ("stack-" + std::to_string(getpid()) + ".txt");
    const int opened = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
    if (opened < 0) return;
    write_line(opened, std::to_string(number));
    std::array<void*, 1> frame{};
    backtrace(frame.data(), static_cast<int>(frame.size()));
    file = {.process = getpid(), .path = path};
    descriptor = opened;
    struct sigaction writing = {};
    writing.sa_handler = &write_stack;
    writing.sa_flags = SA_RESTART;  // Calls of the program go on as if there had been no signal.
    sigaction(number, &writing, nullptr);
    std::atexit(&remove_file);
  } catch (...) {  // The answer would have been a help.
  }
}

}  // namespace fsdp::events
