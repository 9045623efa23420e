#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <system_error>

namespace fsdp::ckpt {

// Numbers in the text of sidecars, owner files and hidden names.

/// The number that all of `text` is, in digits of `base`; nothing if it is none, is negative, or does not fit.
template <typename Number>
std::optional<Number> number_in(std::string_view text, int base = 10) {
  Number number = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number, base);
  if (text.empty() || result.ec != std::errc() || result.ptr != end || number < 0) return std::nullopt;
  return number;
}

namespace detail {
inline std::string padded(std::uint64_t number, std::size_t width, int base) {
  char digits[20];  // of 2^64 - 1
  const auto result = std::to_chars(digits, digits + sizeof(digits), number, base);
  const auto length = static_cast<std::size_t>(result.ptr - digits);
  return std::string(length < width ? width - length : 0, '0').append(digits, length);
}
}  // namespace detail

/// Decimal digits, with zeros before them up to `width`.
inline std::string padded(std::uint64_t number, std::size_t width) { return detail::padded(number, width, 10); }

/// What hexadecimal() gives is so long.
inline constexpr std::size_t kHexDigits = 8;
/// 7 is "00000007".
inline std::string hexadecimal(std::uint32_t number) { return detail::padded(number, kHexDigits, 16); }

/// hexadecimal() of a number that the system draws.
inline std::string random_digits() {
  static thread_local std::random_device random;
  return hexadecimal(random());
}

}  // namespace fsdp::ckpt
