#include "checkpoint/printable.h"

#include <algorithm>
#include <cstdio>

namespace fsdp::ckpt {
namespace {

std::string escaped(std::string_view text, std::string_view kept) {
  const auto may_need = [](unsigned char byte) { return byte < 0x20 || byte == 0x7f || byte == 0xc2; };
  if (std::none_of(text.begin(), text.end(), may_need)) return std::string(text);  // true for nearly all texts
  std::string result;
  result.reserve(text.size());
  const auto escape = [&](unsigned char byte) {
    char digits[5];
    std::snprintf(digits, sizeof(digits), "\\x%02x", byte);
    result += digits;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    if ((byte < 0x20 && kept.find(text[i]) == std::string_view::npos) || byte == 0x7f) {
      escape(byte);
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {  // U+0080 to U+009F in UTF-8
      escape(byte);
      escape(next);
      ++i;
    } else {
      result += text[i];
    }
  }
  return result;
}

}  // namespace

std::string printable(std::string_view text) { return escaped(text, "\n\t"); }

std::string printable_line(std::string_view text) { return escaped(text, ""); }

}  // namespace fsdp::ckpt
