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

/// Parses all of `text` as a number in digits of `base`. Nothing if it is not a number, is negative, or does not fit the type.
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
  char digits[20];  // as many as 2^64 - 1 has
  const auto result = std::to_chars(digits, digits + sizeof(digits), number, base);
  const auto length = static_cast<std::size_t>(result.ptr - digits);
  return std::string(length < width ? width - length : 0, '0').append(digits, length);
}
}  // namespace detail

/// Decimal digits, with zeros before them up to `width`.
inline std::string padded(std::uint64_t number, std::size_t width) { return detail::padded(number, width, 10); }

/// The length of the text that hexadecimal() returns.
inline constexpr std::size_t kHexDigits = 8;
/// Returns eight hexadecimal digits: "00000007" for 7.
inline std::string hexadecimal(std::uint32_t number) { return detail::padded(number, kHexDigits, 16); }

/// Returns hexadecimal() of a random number, which the system draws.
inline std::string random_digits() {
  static thread_local std::random_device random;
  return hexadecimal(random());
}

}  // namespace fsdp::ckpt
