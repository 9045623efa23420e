#include "checkpoint/checksum.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace fsdp::ckpt {
namespace checksum_test {

std::span<const char> bytes(std::string_view text) { return {text.data(), text.size()}; }

std::string some_bytes(std::size_t length) {
  std::string data(length, '\0');
  std::uint32_t state = 1;
  for (char& byte : data) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<char>(state >> 24);
  }
  return data;
}

/// Bit by bit; `crc` is that of the bytes before.
std::uint32_t slow_crc(std::uint32_t crc, std::string_view data) {
  std::uint32_t state = ~crc;
  for (const char byte : data) {
    state ^= static_cast<unsigned char>(byte);
    for (int i = 0; i < 8; ++i) state = state >> 1 ^ ((state & 1) != 0 ? 0xEDB88320U : 0);
  }
  return ~state;
}

TEST(Checksum, KnownValues) {
  EXPECT_EQ(crc32(0, bytes("123456789")), 0xCBF43926U);
  EXPECT_EQ(crc32(0, {}), 0U);
}

// Each way that this processor has.
TEST(Checksum, AllLengthsAndAlignments) {
  constexpr std::size_t kMost = 2048;
  const std::string data = some_bytes(kMost + 64);
  for (const detail::Crc32Way& way : detail::crc32_ways()) {
    SCOPED_TRACE(way.name);
    for (const std::size_t begin : {0, 1, 7, 33, 63}) {
      std::uint32_t expected = ~0U;  // the slow one's register, byte after byte
      for (std::size_t length = 0; length <= kMost; ++length) {
        ASSERT_EQ(way.update(~0U, data.data() + begin, length), expected) << length << " bytes from " << begin;
        expected = ~slow_crc(~expected, std::string_view(data).substr(begin + length, 1));
      }
    }
  }
}

TEST(Checksum, EachWayContinuesAnother) {
  const std::string data = some_bytes(3000);
  const std::uint32_t expected = slow_crc(0, data);
  for (const detail::Crc32Way& first : detail::crc32_ways()) {
    for (const detail::Crc32Way& second : detail::crc32_ways()) {
      for (std::size_t cut = 0; cut <= data.size(); cut += 37) {
        const std::uint32_t state = first.update(~0U, data.data(), cut);
        ASSERT_EQ(~second.update(state, data.data() + cut, data.size() - cut), expected)
            << first.name << ", " << second.name << ", " << cut;
      }
    }
  }
}

TEST(Checksum, HasAWayForEachWidth) {
  std::size_t ways = 1;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("pclmul") != 0) ++ways;
#endif
  EXPECT_EQ(detail::crc32_ways().size(), ways);
}

TEST(Checksum, InPartsAndCombined) {
  const std::string data = some_bytes(5000);
  const std::string_view all = data;
  for (std::size_t cut = 0; cut <= all.size(); cut += 37) {
    const auto a = bytes(all.substr(0, cut));
    const auto b = bytes(all.substr(cut));
    ASSERT_EQ(crc32(crc32(0, a), b), slow_crc(0, all));
    ASSERT_EQ(combine_crc32(0, crc32(0, b), b.size()), crc32(0, b));
    ASSERT_EQ(combine_crc32(crc32(0, a), crc32(0, b), b.size()), crc32(0, bytes(all)));
  }
}

}  // namespace checksum_test
}  // namespace fsdp::ckpt
