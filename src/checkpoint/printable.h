#pragma once

#include <string>
#include <string_view>

namespace fsdp::ckpt {

/// `text` with what a terminal could take for commands escaped, as in \x1b: control characters of ASCII and of Unicode. Line ends and tabs
/// stay. For names, which come from files, before people see them.
std::string printable(std::string_view text);

/// The same, line ends and tabs included: for what must stay one line.
std::string printable_line(std::string_view text);

}  // namespace fsdp::ckpt
