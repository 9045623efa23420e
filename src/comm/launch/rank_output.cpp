#include "comm/launch/rank_output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

void pass_on_all(int fd, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EAGAIN) {  // Some program has made the terminal non-blocking.
      pollfd ready{.fd = fd, .events = POLLOUT, .revents = 0};
      poll(&ready, 1, -1);
      continue;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // The reader has closed the stream.
    done += static_cast<std::size_t>(n);
  }
}

}  // namespace

Pipe Pipe::open() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw Error(std::string("launch_local: pipe: ") + std::strerror(errno));
  return {.to_read = Descriptor(ends[0]), .to_write = Descriptor(ends[1])};
}

PrefixedStream::PrefixedStream(int rank, int target)
    : prefix_(std::string("[") + std::to_string(rank) + "] "), target_(target), pipe_(Pipe::open()) {}

void PrefixedStream::become_target() const { dup2(pipe_.to_write.get(), target_); }

void PrefixedStream::pass_on() {
  std::array<char, 4096> buffer{};
  const ssize_t n = read(fd(), buffer.data(), buffer.size());
  if (n > 0) {
    unwritten_.append(buffer.data(), static_cast<std::size_t>(n));
    write_lines(unwritten_.rfind('\n') + 1);
  } else if (n == 0 || errno != EINTR) {
    pipe_.to_read.close_now();
  }
}

void PrefixedStream::finish() {
  if (fd() >= 0) fcntl(fd(), F_SETFL, O_NONBLOCK);
  while (fd() >= 0) pass_on();
  if (unwritten_.empty()) return;
  unwritten_ += '\n';
  write_lines(unwritten_.size());
}

void PrefixedStream::write_lines(std::size_t end) {
  std::string lines;
  for (std::size_t begin = 0; begin < end;) {
    const std::size_t next = unwritten_.find('\n', begin) + 1;
    lines.append(prefix_).append(unwritten_, begin, next - begin);
    begin = next;
  }
  unwritten_.erase(0, end);
  pass_on_all(target_, lines);
}

}  // namespace fsdp::comm
