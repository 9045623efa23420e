#pragma once

#include <string>

#include "comm/launch/descriptor.h"

namespace fsdp::comm {

/// A stream of a rank, whole lines of which are passed on to one of this process's own, each behind the rank's number.
class PrefixedStream {
 public:
  /// `target`: the descriptor of the same stream in this process and in the rank. Throws Error.
  PrefixedStream(int rank, int target);

  /// In the rank: the target is the pipe from now on.
  void become_target() const;
  /// In the process that reads, once the rank has been started.
  void close_write_end() { pipe_.to_write.close_now(); }

  /// What is to be polled; -1 once the other end is closed.
  int fd() const { return pipe_.to_read.get(); }
  /// Reads once, and passes on whole lines.
  void pass_on();
  /// The rank has ended: the rest of what it wrote, also without the end of a line. A process that it left behind may hold the pipe open.
  void finish();

 private:
  void write_lines(std::size_t end);

  std::string prefix_;
  int target_;
  Pipe pipe_;
  std::string unwritten_;
};

}  // namespace fsdp::comm
