#include <bit>
#include <limits>
#include <utility>

#include "checkpoint/pickle.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

/// The largest size in bytes of strings that are written only once if they occur often. Longer strings are repeated, because a reader
/// (python_value()) refuses a pickle whose values need much more memory than the pickle.
constexpr std::size_t kMostRemembered = 64;

void append_number(std::string& text, std::uint64_t value, int width) {
  for (int i = 0; i < width; ++i) text += static_cast<char>(value >> (8 * i));
}

}  // namespace

PickleWriter::PickleWriter() : text_("\x80\x02") {}

void PickleWriter::integer(std::int64_t value) {
  if (value >= 0 && value <= 0xFF) {
    op('K');
    append_number(text_, static_cast<std::uint64_t>(value), 1);
  } else if (value >= 0 && value <= 0xFFFF) {
    op('M');
    append_number(text_, static_cast<std::uint64_t>(value), 2);
  } else if (value == static_cast<std::int32_t>(value)) {
    op('J');
    append_number(text_, static_cast<std::uint64_t>(value), 4);
  } else {
    text_ += "\x8a\x08";
    append_number(text_, static_cast<std::uint64_t>(value), 8);
  }
}

void PickleWriter::real(double value) {
  op('G');
  const auto bits = std::bit_cast<std::uint64_t>(value);
  for (int shift = 56; shift >= 0; shift -= 8) text_ += static_cast<char>(bits >> shift);
}

void PickleWriter::string(std::string_view value) {
  const bool is_remembered = value.size() <= kMostRemembered;
  std::string key;
  if (is_remembered) {
    key = std::string("s").append(value);
    if (recall(key)) return;
  }
  if (value.size() > std::numeric_limits<std::uint32_t>::max()) throw Error("a string of more than 4 GiB cannot be pickled");
  op('X');
  append_number(text_, value.size(), 4);
  text_ += value;
  if (is_remembered) remember(std::move(key));
}

void PickleWriter::bytes(std::string_view value) {
  // Latin-1 has a character for each byte; this is its UTF-8.
  std::string characters;
  for (const char byte : value) {
    const auto code = static_cast<unsigned char>(byte);
    if (code < 0x80) {
      characters += byte;
    } else {
      characters += static_cast<char>(0xC0 | code >> 6);
      characters += static_cast<char>(0x80 | (code & 0x3F));
    }
  }
  global("_codecs", "encode");
  begin_tuple();
  string(characters);
  string("latin1");
  end_tuple();
  reduce();
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  std::string text = std::string("c").append(module).append("\n").append(name).append("\n");
  if (recall(text)) return;
  text_ += text;
  remember(std::move(text));
}

void PickleWriter::instance(std::string_view module, std::string_view name) {
  global(module, name);
  op(')');
  new_object();
}

std::string PickleWriter::finish() {
  op('.');
  return std::move(text_);
}

bool PickleWriter::recall(const std::string& key) {
  const auto found = memo_.find(key);
  if (found == memo_.end()) return false;
  const bool is_short = found->second <= 0xFF;
  op(is_short ? 'h' : 'j');
  append_number(text_, found->second, is_short ? 1 : 4);
  return true;
}

void PickleWriter::remember(std::string key) {
  const auto index = static_cast<std::uint32_t>(memo_.size());
  const bool is_short = index <= 0xFF;
  op(is_short ? 'q' : 'r');
  append_number(text_, index, is_short ? 1 : 4);
  memo_.emplace(std::move(key), index);
}

}  // namespace fsdp::ckpt
