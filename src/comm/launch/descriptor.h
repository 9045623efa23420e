#pragma once

#include <unistd.h>

#include <utility>

namespace fsdp::comm {

/// A file descriptor, which the destructor closes unless it has been released.
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

/// A pipe, whose ends are closed when a program is executed (close-on-exec). Throws Error.
struct Pipe {
  static Pipe open();
  Descriptor to_read;
  Descriptor to_write;
};

}  // namespace fsdp::comm
