#pragma once

#include <cstdint>
#include <string>
#include <vector>

// The stacks of C++ programs, as they have written them (events::write_stack_when_asked()).
namespace fsdp::report {

/// The frames of the last stack in the text, from the outermost to the innermost. The process still runs on this host. If the program was
/// compiled with lines (-g), and addr2line of binutils is installed, a frame of the program is
/// `File "/home/me/train.cpp", line 12 in next_batch()`, as Python writes it; otherwise it is `next_batch()+0x1f (/home/me/train)`, or only
/// the offset, as are those of libraries.
std::vector<std::string> lines_of_native_stack(const std::string& text, std::int64_t process);

/// Whether such a frame, or a line of Python, is not in a library of the system, of torch, or of this project.
bool is_of_program(const std::string& line);

}  // namespace fsdp::report
