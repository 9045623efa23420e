#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace fsdp {

/// Ignores a signal, unless the program handles it.
inline void ignore_signal(int signal) noexcept {
  struct sigaction action = {};
  if (sigaction(signal, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL) {
    action.sa_handler = SIG_IGN;
    sigaction(signal, &action, nullptr);
  }
}

/// Makes this process ready for files and sockets of the library; call it before it opens any. Idempotent; any thread.
///
/// Standard streams that are closed are opened on /dev/null. Otherwise a descriptor of the library would get the number of such a stream:
/// the program's output would be written to it, and redirecting the stream would close it. A write beyond the limit of files' sizes
/// (`ulimit -f`) becomes an error, as in Python, unless the program handles the signal, which would end the process.
inline void prepare_process() noexcept {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // open() takes the lowest free number, which is that of the stream. It stays open on exec, as programs that are started need it, too.
    if (fcntl(stream, F_GETFD) < 0 && errno == EBADF) open("/dev/null", O_RDWR);
  }
  ignore_signal(SIGXFSZ);
}

/// The object of this type that belongs to this process. It is made at the first call, and never destroyed. A forked process gets a new
/// one: a thread of its parent may have held the old one's locks, and the threads of the old one do not exist there.
template <typename T>
T& of_this_process() {
  static T* object = nullptr;
  static const int registered = [] {
    object = new T();
    return pthread_atfork(nullptr, nullptr, [] { object = new T(); });
  }();
  (void)registered;  // Out of memory: then a forked process has its parent's.
  return *object;
}

}  // namespace fsdp
