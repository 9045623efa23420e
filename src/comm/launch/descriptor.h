#pragma once

#include <unistd.h>

#include <utility>

namespace fsdp::comm {

/// A file descriptor, which is closed in the end unless somebody has taken it.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { close_now(); }
  Descriptor(Descriptor&& other) noexcept : fd_(other.take()) {}
  Descriptor& operator=(Descriptor&&) = delete;

  int get() const { return fd_; }
  int take() { return std::exchange(fd_, -1); }
  void close_now() {
    if (fd_ >= 0) close(take());
  }

 private:
  int fd_;
};

/// Both ends are closed where a program is executed. Throws Error.
struct Pipe {
  static Pipe open();
  Descriptor to_read;
  Descriptor to_write;
};

}  // namespace fsdp::comm
