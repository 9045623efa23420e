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

/// Bit by bit.
std::uint32_t slow_crc(std::string_view data) {
  std::uint32_t state = ~0U;
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

TEST(Checksum, AllLengthsAlignmentsAndBeginnings) {
  const std::string data = some_bytes(400);
  for (std::size_t length = 0; length <= 300; ++length) {
    for (const std::size_t begin : {0, 1, 7}) {
      const std::string_view part = std::string_view(data).substr(begin, length);
      ASSERT_EQ(crc32(0, bytes(part)), slow_crc(part)) << length;
      ASSERT_EQ(detail::portable_crc32(0, bytes(part)), slow_crc(part)) << length;
    }
  }
}

TEST(Checksum, InPartsAndCombined) {
  const std::string data = some_bytes(1000);
  const std::string_view all = data;
  for (std::size_t cut = 0; cut <= all.size(); cut += 37) {
    const auto a = bytes(all.substr(0, cut));
    const auto b = bytes(all.substr(cut));
    ASSERT_EQ(crc32(crc32(0, a), b), crc32(0, bytes(all)));
    ASSERT_EQ(combine_crc32(0, crc32(0, b), b.size()), crc32(0, b));
    ASSERT_EQ(combine_crc32(crc32(0, a), crc32(0, b), b.size()), crc32(0, bytes(all)));
  }
}

}  // namespace checksum_test
}  // namespace fsdp::ckpt
