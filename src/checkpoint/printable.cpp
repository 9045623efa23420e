#include "checkpoint/printable.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace fsdp::ckpt {
namespace {

std::string escaped_byte(unsigned char byte) {
  char digits[5];
  std::snprintf(digits, sizeof(digits), "\\x%02x", byte);
  return digits;
}

std::string escaped(std::string_view text, std::string_view kept) {
  const auto may_need = [](unsigned char byte) { return byte < 0x20 || byte == 0x7f || byte == 0xc2; };
  if (std::none_of(text.begin(), text.end(), may_need)) return std::string(text);  // true for nearly all texts
  std::string result;
  result.reserve(text.size());
  const auto escape = [&](unsigned char byte) { result += escaped_byte(byte); };
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

std::string printable_bytes(std::string_view text) {
  std::string result;
  for (const char letter : text) {
    const auto byte = static_cast<unsigned char>(letter);
    result += byte < 0x20 || byte >= 0x7f ? escaped_byte(byte) : std::string(1, letter);
  }
  return result;
}

bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    if (lead < 0xc2 || lead > 0xf4) return false;
    const std::size_t more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    std::uint32_t code = lead & (0x3fU >> more);
    for (std::size_t k = i + 1; k <= i + more; ++k) {
      const auto next = static_cast<unsigned char>(k < text.size() ? text[k] : 0);
      if ((next & 0xc0) != 0x80) return false;
      code = code << 6 | (next & 0x3fU);
    }
    const std::uint32_t least = more == 3 ? 0x10000 : more == 2 ? 0x800 : 0x80;
    if (code < least || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
    i += more + 1;
  }
  return true;
}

}  // namespace fsdp::ckpt
