#pragma once

#include <string>

#include "comm/launch/descriptor.h"

namespace fsdp::comm {

/// A stream of a rank. Its lines are passed on to the same stream of this process, with the rank's number before each.
class PrefixedStream {
 public:
  /// `target`: the descriptor of the same stream in this process and in the rank. Throws Error.
  PrefixedStream(int rank, int target);

  /// Call it in the rank: connects the target descriptor to the pipe.
  void become_target() const;
  /// Call it in the process that reads, after the rank has been started.
  void close_write_end() { pipe_.to_write.close_now(); }

  /// The descriptor to poll; -1 once the other end is closed.
  int fd() const { return pipe_.to_read.get(); }
  /// Reads once, and passes on whole lines.
  void pass_on();
  /// Passes on the rest of the output after the rank has ended, even if it does not end in a line end. A process that the rank left behind
  /// may still hold the pipe open.
  void finish();

 private:
  void write_lines(std::size_t end);

  std::string prefix_;
  int target_;
  Pipe pipe_;
  std::string unwritten_;
};

}  // namespace fsdp::comm
