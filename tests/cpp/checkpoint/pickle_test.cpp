#include "checkpoint/pickle.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/python_value.h"
#include "fsdp/error.h"
#include "support/messages.h"
#include "support/python_peer.h"

namespace fsdp::ckpt {
namespace pickle_test {

using fsdp::testing::message_of;
using fsdp::testing::read_file;
using fsdp::testing::run_python;
using fsdp::testing::TemporaryFolder;
using namespace std::string_literals;

PythonValue read(const std::string& data) {
  const Pickle pickle(data, "test.pkl", kPlainGlobals);
  return python_value(pickle.root(), data.size());
}

std::string error_of(const std::string& data) {
  return message_of([&] { read(data); });
}

PythonValue text(const char* value) { return {std::string(value)}; }
PythonValue integer(std::int64_t value) { return {value}; }

template <typename Sequence>
PythonValue sequence(std::vector<PythonValue> items) {
  return {Sequence{std::move(items)}};
}
PythonValue list(std::vector<PythonValue> items) { return sequence<PythonValue::List>(std::move(items)); }
PythonValue tuple(std::vector<PythonValue> items) { return sequence<PythonValue::Tuple>(std::move(items)); }

/// PLAIN of checkpoint_peer.py.
PythonValue plain() {
  PythonValue::Bytes bytes;
  for (int i = 0; i < 256; ++i) bytes.data += static_cast<char>(i);
  const std::vector<PythonValue> four = {integer(1), integer(2), integer(3), integer(4)};
  std::vector<PythonValue> tuples;
  for (int count = 0; count <= 4; ++count) tuples.push_back(tuple({four.begin(), four.begin() + count}));
  std::vector<PythonValue> integers;
  for (const std::int64_t value : {std::int64_t{0}, std::int64_t{255}, std::int64_t{256}, std::int64_t{65535}, std::int64_t{65536},
                                   std::int64_t{2147483647}, std::int64_t{-2147483648}, std::int64_t{2147483648},
                                   std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min(), std::int64_t{-1}}) {
    integers.push_back(integer(value));
  }
  return {PythonValue::Dict{{
      {text("none"), {}},
      {text("truth"), list({{true}, {false}})},
      {text("integers"), list(integers)},
      {text("reals"), list({{0.0}, {-0.0}, {1.5}, {1e300}, {std::numeric_limits<double>::infinity()}})},
      {text("text"), text("gr\u00fc\u00dfe \U0001f600")},
      {text("bytes"), {bytes}},
      {text("tuples"), tuple(tuples)},
      {text("nested"), {PythonValue::Dict{{{text("list"), list({list({}), list({list({})})})}, {text("dict"), {PythonValue::Dict{}}}}}}},
      {integer(7), text("seven")},
      {text("again"), list({text("text"), text("text")})},
  }}};
}

TEST(Pickle, ReadsWhatPythonWrites) {
  const TemporaryFolder folder;
  run_python("write_pickles", folder.path());
  for (const char* protocol : {"2", "3", "4", "5"}) {
    EXPECT_EQ(read(read_file(folder.path() / ("plain."s + protocol))), plain()) << protocol;
  }
  EXPECT_EQ(read(read_file(folder.path() / "ordered")),
            (PythonValue{PythonValue::Dict{{{text("a"), integer(1)}, {text("b"), integer(2)}}}}));
}

TEST(Pickle, PythonReadsWhatItWrites) {
  const TemporaryFolder folder;
  PickleWriter writer;
  write(writer, plain());
  const std::string data = writer.finish();
  EXPECT_EQ(read(data), plain());
  folder.write("plain", data);
  run_python("check_pickle", folder.path());
}

TEST(Pickle, RunsNothing) {
  // What `pickle.dumps` makes of an object whose __reduce__ returns (os.system, ("echo pwned",)), in protocols 2 and 4.
  EXPECT_NE(error_of("\x80\x02"s + "cposix\nsystem\n" + "X\x0a\0\0\0"s + "echo pwned\x85R.").find("the global 'posix.system'"),
            std::string::npos);
  EXPECT_NE(error_of("\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0a"s + "echo pwned\x85R.").find("the global 'posix.system'"),
            std::string::npos);
  // Names that only together look like an allowed one.
  EXPECT_NE(error_of("\x80\x02"s + "c_codecs.\nencode\n.").find("no business"), std::string::npos);
  EXPECT_NE(error_of("\x80\x02"s + "ccollections.OrderedDict\n\n.").find("no business"), std::string::npos);
  // Calls of what is no global, or of a known one on other arguments.
  EXPECT_NE(error_of("\x80\x02"s + "K\x01)R.").find("a call of the integer 1"), std::string::npos);
  EXPECT_NE(error_of("\x80\x02"s + "c_codecs\nencode\nK\x01K\x02\x86R.").find("expected a string"), std::string::npos);
}

TEST(Pickle, PatternsAllowAModuleOrAll) {
  const std::string data = "\x80\x02"s + "ctorch\nfloat99\n.";
  for (const std::string_view pattern : {"torch.*", "*", "torch.float99"}) {
    const Pickle pickle(data, "test.pkl", std::array{pattern});
    EXPECT_EQ(pickle.root().global(), "torch.float99");
    EXPECT_EQ(pickle.globals(), std::vector<std::string_view>{"torch.float99"});
  }
  const std::string others[] = {"\x80\x02"s + "ctorch.jit\nload\n.", "\x80\x02"s + "ctorchx\nload\n.", "\x80\x02"s + "ctorc\nh.load\n.",
                                "\x80\x02"s + "ctorch\n" + std::string(200, 'x') + "\n."};
  for (const auto& other : others) {
    EXPECT_NE(message_of([&] { const Pickle pickle(other, "test.pkl", std::array<std::string_view, 1>{"torch.*"}); }).find("no business"),
              std::string::npos);
  }
}

TEST(Pickle, ErrorsNameFilePositionAndFinding) {
  EXPECT_EQ(error_of("\x80\x02X\xff\xff\xff\xffhi."s), "test.pkl, byte 2: the pickle ends early: 4294967295 bytes wanted, 3 left");
  EXPECT_EQ(error_of("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffhi."s),
            "test.pkl, byte 2: the pickle ends early: 18446744073709551615 bytes wanted, 3 left");
  EXPECT_EQ(error_of(""), "test.pkl, byte 0: the pickle ends early: 2 bytes wanted, 0 left");
  EXPECT_EQ(error_of("junk"), "test.pkl, byte 0: not a pickle of protocol 2 to 5");
  EXPECT_EQ(error_of("\x80\x02K\x01"s), "test.pkl, byte 4: the pickle ends early: 1 bytes wanted, 0 left");
  EXPECT_EQ(error_of("\x80\x02."s), "test.pkl, byte 2: the pickle ends with 0 values instead of one");
  EXPECT_EQ(error_of("\x80\x02NN."s), "test.pkl, byte 4: the pickle ends with 2 values instead of one");
  EXPECT_EQ(error_of("\x80\x02N.N"s), "test.pkl, byte 3: 1 bytes follow the end of the pickle");
  EXPECT_EQ(error_of("\x80\x02(N."s), "test.pkl, byte 4: the pickle ends with 1 values instead of one");
  EXPECT_EQ(error_of("\x80\x02r\xff\xff\xff\xff."s), "test.pkl, byte 2: a memo index of 4294967295 in 8 bytes");
  EXPECT_EQ(error_of("\x80\x02h\x05."s), "test.pkl, byte 2: no value 5 in the memo");
  EXPECT_EQ(error_of("\x80\x02Na."s), "test.pkl, byte 3: the stack holds too few values for this operation");
  EXPECT_EQ(error_of("\x80\x02](Na."s), "test.pkl, byte 5: the stack holds too few values for this operation");
  EXPECT_EQ(error_of("\x80\x02NNa."s), "test.pkl, byte 4: cannot add elements to None");
  EXPECT_EQ(error_of("\x80\x02}(Nu."s), "test.pkl, byte 5: a dict with a key that has no value");
  EXPECT_EQ(error_of("\x80\x02t."s), "test.pkl, byte 2: no mark on the stack");
  EXPECT_EQ(error_of("\x80\x02(e."s), "test.pkl, byte 3: nothing on the stack to add to");
  EXPECT_EQ(error_of("\x80\x02NNb."s), "test.pkl, byte 4: a state for None");
  EXPECT_EQ(error_of("\x80\x02\x8a\x09\1\1\1\1\1\1\1\1\1."s),
            "test.pkl, byte 2: expected None, bool, int, float, str, bytes, tuple, list or dict, found an integer of 9 bytes");
  EXPECT_EQ(error_of("\x80\x02\x82\x01."s), "test.pkl, byte 2: the operation 130 has no use in checkpoints");
  EXPECT_EQ(error_of("\x80\x05\x97."s), "test.pkl, byte 2: the operation 151 has no use in checkpoints");
}

TEST(Pickle, LongIntegers) {
  EXPECT_EQ(read("\x80\x02\x8a\x00."s), integer(0));
  EXPECT_EQ(read("\x80\x02\x8a\x01\xff."s), integer(-1));
  EXPECT_EQ(read("\x80\x02\x8a\x02\xff\x00."s), integer(255));
  EXPECT_EQ(read("\x80\x02\x8b\x03\x00\x00\x00\x00\x00\x80."s), integer(-8388608));
}

TEST(Pickle, CyclesAndSharedPartsAreHarmless) {
  // x = []; x.append(x)
  EXPECT_NE(error_of("\x80\x02]q\x00h\x00"s + "a.").find("nested no deeper"), std::string::npos);
  // (x, x), where x is (y, y), where y is ...
  std::string nested = "\x80\x02N\x85q\x00"s;
  for (char i = 1; i < 90; ++i) nested += "h"s + static_cast<char>(i - 1) + "\x86q" + i;
  EXPECT_NE(error_of(nested + ".").find("share less"), std::string::npos);
}

TEST(Pickle, DeepNestingIsReadWithoutRecursion) {
  std::string data = "\x80\x02N"s;
  data.append(1000000, '\x85');
  EXPECT_NE(error_of(data + ".").find("nested no deeper"), std::string::npos);
}

TEST(PickleWriter, ManyStringsUseLongMemoIndices) {
  PythonValue::List items;
  for (int i = 0; i < 1000; ++i) items.items.push_back(text(std::to_string(i % 500).c_str()));
  const PythonValue value{items};
  PickleWriter writer;
  write(writer, value);
  EXPECT_EQ(read(writer.finish()), value);
}

TEST(PickleWriter, WhatRepeatsLongStringsIsReadAgain) {
  const PythonValue value = list(std::vector<PythonValue>(1000, text(std::string(10000, 'x').c_str())));
  PickleWriter writer;
  write(writer, value);
  EXPECT_EQ(read(writer.finish()), value);
}

}  // namespace pickle_test
}  // namespace fsdp::ckpt
