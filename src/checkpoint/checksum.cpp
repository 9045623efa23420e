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

/// The factors that move 128 bits of a message on by `bits`: for its earlier and its later half.
__m128i fold_factors(std::uint64_t bits) {
  const std::array<std::uint64_t, 2> factors = {std::uint64_t{power_of_x(bits + 32)} << 1, std::uint64_t{power_of_x(bits - 32)} << 1};
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(factors.data()));
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i value, __m128i factors, __m128i next) {
  const __m128i earlier = _mm_clmulepi64_si128(value, factors, 0x00);
  const __m128i later = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(earlier, later), next);
}

inline __m128i load(const char* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

/// Folding (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", 2009): four vectors hold a message
/// of the same remainder as all bytes so far. What is left of it at the end goes through the tables.
__attribute__((target("pclmul,sse4.1"))) std::uint32_t update_by_folding(std::uint32_t state, const char* data, std::size_t length) {
  static const __m128i by_four = fold_factors(4 * 128);
  static const __m128i by_one = fold_factors(128);
  __m128i lanes[4] = {load(data), load(data + 16), load(data + 32), load(data + 48)};
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  const __m128i factors = by_four;
  for (data += 64, length -= 64; length >= 64; data += 64, length -= 64) {
    for (std::size_t i = 0; i < 4; ++i) lanes[i] = fold(lanes[i], factors, load(data + 16 * i));
  }
  __m128i all = lanes[0];
  for (std::size_t i = 1; i < 4; ++i) all = fold(all, by_one, lanes[i]);
  for (; length >= 16; data += 16, length -= 16) all = fold(all, by_one, load(data));
  std::array<char, 16> rest{};
  std::memcpy(rest.data(), &all, sizeof(all));
  return update_by_tables(update_by_tables(0, rest.data(), rest.size()), data, length);
}

#endif

std::uint32_t update(std::uint32_t crc, std::span<const char> data) {
#if defined(__x86_64__)
  static const bool can_fold = __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
  if (can_fold && data.size() >= 64) return ~update_by_folding(~crc, data.data(), data.size());
#endif
  return ~update_by_tables(~crc, data.data(), data.size());
}

}  // namespace

std::uint32_t crc32(std::uint32_t crc, std::span<const char> data) { return update(crc, data); }

std::uint32_t combine_crc32(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t length_b) {
  // Most lengths are those of a block, one after the other.
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
std::uint32_t portable_crc32(std::uint32_t crc, std::span<const char> data) { return ~update_by_tables(~crc, data.data(), data.size()); }
}  // namespace detail

}  // namespace fsdp::ckpt
