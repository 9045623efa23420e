#include "checkpoint/checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fsdp::ckpt {
namespace {

// Polynomials over GF(2), modulo the checksum's P of degree 32. "Reflected": the coefficient of x^0 is the highest bit, as in the bytes'
// order of the checksum.
constexpr std::uint32_t kPolynomial = 0xEDB88320U;

constexpr std::uint32_t times_x(std::uint32_t a) { return a >> 1 ^ ((a & 1) != 0 ? kPolynomial : 0); }

constexpr std::uint32_t product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t sum = 0;
  for (std::uint32_t bit = 1U << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) sum ^= b;
    b = times_x(b);
  }
  return sum;
}

/// x^n.
constexpr std::uint32_t power_of_x(std::uint64_t n) {
  std::uint32_t result = 1U << 31;
  std::uint32_t square = 1U << 30;  // x, x^2, x^4, ...
  for (; n != 0; n >>= 1) {
    if ((n & 1) != 0) result = product(result, square);
    square = product(square, square);
  }
  return result;
}

/// tables[k][b]: what a byte b that is followed by k other ones adds to the checksum.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t value = b;
    for (int i = 0; i < 8; ++i) value = times_x(value);
    tables[0][b] = value;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t b = 0; b < 256; ++b) tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 0xFF];
  }
  return tables;
}

constexpr Tables kTables = make_tables();

/// From register to register: without the inversions before and after.
std::uint32_t update_by_tables(std::uint32_t state, const char* data, std::size_t length) {
  for (; length >= 8; data += 8, length -= 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = 0;
    for (std::size_t k = 0; k < 8; ++k) state ^= kTables[7 - k][word >> (8 * k) & 0xFF];
  }
  for (; length > 0; ++data, --length) state = state >> 8 ^ kTables[0][(state ^ static_cast<unsigned char>(*data)) & 0xFF];
  return state;
}

#if defined(__x86_64__)

// Folding (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", 2009): four vectors hold a message
// with the same remainder as all bytes so far. At the end, the tables compute the remainder of this message. The vectors are single
// variables, because compilers would keep an array in memory at -O2.

/// The factors by which each 128 bits of a message are moved by `bits`: one for their earlier half, one for their later half.
using Factors = std::array<std::uint64_t, 2>;
constexpr Factors factors_for(std::uint64_t bits) {
  return {std::uint64_t{power_of_x(bits + 32)} << 1, std::uint64_t{power_of_x(bits - 32)} << 1};
}

inline __m128i load128(const void* data) { return _mm_loadu_si128(static_cast<const __m128i*>(data)); }

__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i value, __m128i factors, __m128i next) {
  const __m128i earlier = _mm_clmulepi64_si128(value, factors, 0x00);
  const __m128i later = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(earlier, later), next);
}

__attribute__((target("pclmul,sse4.1"))) std::uint32_t update_by_128(std::uint32_t state, const char* data, std::size_t length) {
  if (length < 64) return update_by_tables(state, data, length);
  static constexpr Factors kByFour = factors_for(4 * 128);
  static constexpr Factors kByOne = factors_for(128);
  const __m128i by_four = load128(kByFour.data());
  const __m128i by_one = load128(kByOne.data());
  __m128i a = _mm_xor_si128(load128(data), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load128(data + 16);
  __m128i c = load128(data + 32);
  __m128i d = load128(data + 48);
  for (data += 64, length -= 64; length >= 64; data += 64, length -= 64) {
    a = fold(a, by_four, load128(data));
    b = fold(b, by_four, load128(data + 16));
    c = fold(c, by_four, load128(data + 32));
    d = fold(d, by_four, load128(data + 48));
  }
  __m128i all = fold(fold(fold(a, by_one, b), by_one, c), by_one, d);
  for (; length >= 16; data += 16, length -= 16) all = fold(all, by_one, load128(data));
  std::array<char, 16> rest{};
  std::memcpy(rest.data(), &all, sizeof(all));
  return update_by_tables(update_by_tables(0, rest.data(), rest.size()), data, length);
}

#endif

}  // namespace

std::uint32_t crc32(std::uint32_t crc, std::span<const char> data) {
  static const detail::Crc32Way fastest = detail::crc32_ways().back();
  return ~fastest.update(~crc, data.data(), data.size());
}

std::uint32_t combine_crc32(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t length_b) {
  // Most calls in a row have the length of a block, so the last result is kept.
  static thread_local std::uint64_t last_length = 0;
  static thread_local std::uint32_t shift = 1U << 31;
  if (length_b != last_length) {
    // (x^length)^8: the number of bits itself might not fit.
    shift = power_of_x(length_b);
    for (int i = 0; i < 3; ++i) shift = product(shift, shift);
    last_length = length_b;
  }
  return product(shift, crc_a) ^ crc_b;
}

namespace detail {
std::vector<Crc32Way> crc32_ways() {
  std::vector<Crc32Way> ways = {{"tables", update_by_tables}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0) ways.push_back({"128 bits", update_by_128});
#endif
  return ways;
}
}  // namespace detail

}  // namespace fsdp::ckpt
