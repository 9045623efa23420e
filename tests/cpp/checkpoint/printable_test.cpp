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

TEST(Printable, TellsUtf8FromOtherBytes) {
  for (const char* text :
       {"", "a.weight", "\xc3\xa4", "\xe2\x82\xac", "\xf0\x9f\x99\x82", "\xed\x9f\xbf", "\xee\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(is_utf8(text)) << printable_bytes(text);
  }
  // Alone, cut off, longer than needed, surrogates, and beyond the last character.
  for (const char* text : {"\xff", "a\x80", "\xc3", "\xe2\x82", "\xc3z", "\xc1\x81", "\xe0\x80\x80", "\xf0\x80\x80\x80", "\xed\xa0\x80",
                           "\xed\xbf\xbf", "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80"}) {
    EXPECT_FALSE(is_utf8(text)) << printable_bytes(text);
  }
  EXPECT_EQ(printable_bytes("a\xff\n"), "a\\xff\\x0a");
}

}  // namespace printable_test
}  // namespace fsdp::ckpt
