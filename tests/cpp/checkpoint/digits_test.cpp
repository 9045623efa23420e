#include "checkpoint/digits.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>

namespace fsdp::ckpt {
namespace digits_test {

TEST(Digits, NumbersComeBack) {
  for (const std::int64_t number : {std::int64_t{0}, std::int64_t{7}, std::int64_t{1} << 40, INT64_MAX}) {
    const std::string text = padded(static_cast<std::uint64_t>(number), 20);
    EXPECT_EQ(text.size(), 20U);
    EXPECT_EQ(number_in<std::int64_t>(text), number);
    EXPECT_EQ(number_in<std::int64_t>(std::to_string(number)), number);
  }
  for (const std::uint32_t number : {0U, 7U, 0x89ABCDEFU, UINT32_MAX}) {
    const std::string text = hexadecimal(number);
    EXPECT_EQ(text.size(), kHexDigits);
    EXPECT_EQ(number_in<std::uint32_t>(text, 16), number);
  }
}

TEST(Digits, HaveAFixedWidth) {
  EXPECT_EQ(padded(42, 5), "00042");
  EXPECT_EQ(padded(123456, 5), "123456");
  EXPECT_EQ(padded(UINT64_MAX, 20), "18446744073709551615");
  EXPECT_EQ(hexadecimal(0xBEEF), "0000beef");
}

TEST(Digits, NothingElseIsANumber) {
  for (const char* text : {"", " 1", "1 ", "1x", "x", "+1", "-1", "-0x", "0x10", "1.0", "9223372036854775808"}) {
    EXPECT_EQ(number_in<std::int64_t>(text), std::nullopt) << text;
  }
  EXPECT_EQ(number_in<std::uint32_t>("100000000", 16), std::nullopt);
  EXPECT_EQ(number_in<std::uint32_t>("0000000g", 16), std::nullopt);
}

TEST(Digits, RandomOnesDiffer) {
  std::set<std::string> seen;
  for (int i = 0; i < 16; ++i) seen.insert(random_digits());
  EXPECT_GT(seen.size(), 12U);
  for (const std::string& digits : seen) EXPECT_TRUE(number_in<std::uint32_t>(digits, 16)) << digits;
}

}  // namespace digits_test
}  // namespace fsdp::ckpt
