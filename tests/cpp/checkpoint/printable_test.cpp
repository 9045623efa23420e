#include "checkpoint/printable.h"

#include <gtest/gtest.h>

#include <string>

namespace fsdp::ckpt {
namespace printable_test {

TEST(Printable, WhatATerminalCouldObeyIsEscaped) {
  EXPECT_EQ(printable("layers.0.weight \xc3\xa4 \xe2\x82\xac \\x1b"), "layers.0.weight \xc3\xa4 \xe2\x82\xac \\x1b");
  EXPECT_EQ(printable("a\x1b[31mb\a\r\b\x7f"), "a\\x1b[31mb\\x07\\x0d\\x08\\x7f");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m\xc2\xa0\xc2"),
            "\\xc2\\x9b31m\xc2\xa0\xc2");
  EXPECT_EQ(printable("two\n\tlines"), "two\n\tlines");
  EXPECT_EQ(printable_line("two\n\tlines"), "two\\x0a\\x09lines");
}

}  // namespace printable_test
}  // namespace fsdp::ckpt
