#pragma once

#include <array>
#include <charconv>
#include <cstddef>
#include <locale>
#include <sstream>
#include <string>
#include <utility>

namespace fsdp {

/// A stream of text whose numbers have the same form under every global locale of the program: 1024.5, not 1.024,5. Other programs and
/// other ranks read such texts.
template <typename Stream>
class ClassicStream : public Stream {
 public:
  template <typename... Arguments>
  explicit ClassicStream(Arguments&&... arguments) : Stream(std::forward<Arguments>(arguments)...) {
    this->imbue(std::locale::classic());
  }
};

/// A number with so many decimals, under every locale, as "%.2f" gives it under the classic one.
inline std::string with_decimals(double value, int decimals) {
  std::array<char, 400> text{};  // The greatest double has 309 digits.
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed, decimals).ptr;
  return {text.data(), end};
}

}  // namespace fsdp
