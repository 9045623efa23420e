#pragma once

#include <string_view>

// The stack of a C++ program, for requests of other processes.
namespace fsdp::events {

/// The first line of a stack that a process has written on request. A line per frame follows, the innermost first, as
/// backtrace_symbols_fd() writes it: "program(function+0x12) [0x55d0]".
inline constexpr std::string_view kNativeStack = "Stack of the main thread, most recent call first:";
/// The last line.
inline constexpr std::string_view kEndOfStack = "End of the stack.";

/// The name of the file in memory for such stacks. It ends with its process, and others find it among the process's open files.
inline constexpr const char* kStackFile = "fsdp-stack";

/// From now on, the signal SIGRTMAX - 3 makes this process append the stack of its main thread to a file kStackFile, whose first line is
/// the number of the signal. Does nothing if the program, or Python's package, has a handler for the signal, or if the file can't be made.
/// One thread at a time.
void write_stack_when_asked() noexcept;

}  // namespace fsdp::events
