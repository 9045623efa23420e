#include "base/classic_stream.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "support/other_locale.h"

namespace fsdp {
namespace classic_stream_test {

TEST(ClassicStream, NumbersAreTheSameUnderAnotherLocale) {
  const testing::OtherLocale other;
  std::ostringstream affected;
  affected << 1024.5;
  ASSERT_EQ(affected.str(), "1.024,5") << "else this test shows nothing";
  ClassicStream<std::ostringstream> text;
  text << 1024.5 << " " << std::int64_t{1234567};
  EXPECT_EQ(text.str(), "1024.5 1234567");
  ClassicStream<std::istringstream> numbers("0.25 1,2");
  double quarter = 0;
  int one = 0;
  numbers >> quarter >> one;
  EXPECT_EQ(quarter, 0.25);
  EXPECT_EQ(one, 1);
}

}  // namespace classic_stream_test
}  // namespace fsdp
