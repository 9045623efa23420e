#include "fsdp/size.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "fsdp/error.h"

namespace size_test {

using fsdp::parse_size;

TEST(Size, IsReadWithItsUnit) {
  EXPECT_EQ(parse_size("80GB"), 80'000'000'000);
  EXPECT_EQ(parse_size("80GiB"), std::int64_t{80} << 30);
  EXPECT_EQ(parse_size("80 GiB"), std::int64_t{80} << 30);
  EXPECT_EQ(parse_size("1.5MiB"), 3 << 19);
  EXPECT_EQ(parse_size("0.1KB"), 100);
  EXPECT_EQ(parse_size("2kB"), 2000);
  EXPECT_EQ(parse_size("3KiB"), 3072);
  EXPECT_EQ(parse_size("7MB"), 7'000'000);
  EXPECT_EQ(parse_size("2TB"), 2'000'000'000'000);
  EXPECT_EQ(parse_size("1TiB"), std::int64_t{1} << 40);
  EXPECT_EQ(parse_size("0B"), 0);
  EXPECT_EQ(parse_size("9223372036854775807B"), std::numeric_limits<std::int64_t>::max());
}

TEST(Size, IsRefusedIfItIsNotClear) {
  for (const char* text :
       {"", "24", "GB", "80gb", "80Gb", "80G", "80GB/s", " 80GB", "-1GB", "nanB", "infB", "0x10B", "1e30TB", "9223372036854775808B"}) {
    try {
      const auto bytes = parse_size(text);
      ADD_FAILURE() << text << " is " << bytes;
    } catch (const fsdp::Error& error) {
      EXPECT_EQ(std::string(error.what()).find("'" + std::string(text) + "' is no size: write a number and a unit"), 0U) << error.what();
    }
  }
}

}  // namespace size_test
