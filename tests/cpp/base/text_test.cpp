#include "base/text.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/other_locale.h"

namespace fsdp {
namespace text_test {

using Names = std::vector<std::string>;

TEST(Text, ListsAreJoined) {
  EXPECT_EQ(joined(Names{}), "");
  EXPECT_EQ(joined(Names{"", "b", "c"}), ", b, c");
  EXPECT_EQ(joined(Names{"a", "b"}, " x ", in_quotes), "'a' x 'b'");
  EXPECT_EQ(first_names({"a", "b"}, 2), "a, b");
  EXPECT_EQ(first_names({"a", "b", "c", "d"}, 2), "a, b and 2 more");
  EXPECT_EQ(in_brackets(std::vector<std::int64_t>{}), "[]");
  const testing::OtherLocale other;
  EXPECT_EQ(in_brackets(std::vector<std::int64_t>{1234567, 3}), "[1234567, 3]");
}

TEST(Text, RanksAreNamedInRuns) {
  EXPECT_EQ(names_of_ranks({4}), "rank 4");
  EXPECT_EQ(names_of_ranks({1, 0}), "ranks 0 and 1");
  EXPECT_EQ(names_of_ranks({0, 1, 2, 4}), "ranks 0-2 and 4");
  EXPECT_EQ(names_of_ranks({5, 0, 2, 1, 9, 8}), "ranks 0-2, 5, 8 and 9");
  EXPECT_EQ(names_of_ranks({0, 2, 4, 6, 8, 10, 12, 14, 16, 18}), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2 more");
}

TEST(Text, DecimalsAreRounded) {
  const testing::OtherLocale other;
  EXPECT_EQ(with_decimals(1234.567, 2), "1234.57");
  EXPECT_EQ(with_decimals(-0.5, 0), "-0");
  EXPECT_EQ(with_decimals(1e300, 1).size(), 303U);
  EXPECT_EQ(shortest(0.1), "0.1");
}

TEST(Text, SizesAreForTablesAndMessages) {
  EXPECT_EQ(size_text(0), "0 B");
  EXPECT_EQ(size_text(1023), "1023 B");
  EXPECT_EQ(size_text(1024), "1.00 KiB");
  EXPECT_EQ(size_text(std::int64_t{5000} << 40), "5000.00 TiB");
  EXPECT_EQ(bytes_text(1), "1 byte");
  EXPECT_EQ(bytes_text((1 << 20) - 1), "1048575 bytes");
  EXPECT_EQ(bytes_text(1 << 20), "1048576 bytes (1.00 MiB)");
  EXPECT_EQ(bytes_text(80'000'000'000), "80000000000 bytes (74.51 GiB)");
}

TEST(Text, NumbersOfATableStandAtTheRight) {
  EXPECT_EQ(table({{"name", "n", "what"}, {"a", "10", "b"}, {"all", "5"}}, 1, " "), " name   n  what\n a     10  b\n all    5\n");
}

}  // namespace text_test
}  // namespace fsdp
