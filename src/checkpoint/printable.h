#pragma once

#include <string>
#include <string_view>

namespace fsdp::ckpt {

/// Escapes the characters in `text` that a terminal could take for commands (control characters of ASCII and of Unicode), as in \x1b. Line
/// ends and tabs stay. Names that come from files are passed through it before they are printed.
std::string printable(std::string_view text);

/// Also escapes line ends and tabs, for text that must stay on one line.
std::string printable_line(std::string_view text);

/// Also escapes all bytes outside of ASCII, for text that is not UTF-8.
std::string printable_bytes(std::string_view text);

/// Whether Python can read the text. UTF-8 has no surrogates and no longer forms than needed.
bool is_utf8(std::string_view text);

}  // namespace fsdp::ckpt
