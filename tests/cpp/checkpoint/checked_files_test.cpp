#include "checkpoint/checked_files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checksum.h"
#include "fsdp/error.h"
#include "support/faulty_files.h"
#include "support/messages.h"
#include "support/python_peer.h"

namespace fsdp::ckpt {
namespace checked_files_test {

namespace fs = std::filesystem;
using fsdp::testing::FaultyFiles;
using fsdp::testing::flip_bit;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::read_file;
using fsdp::testing::TemporaryFolder;

std::string content_of_size(std::int64_t size) {
  std::string content(static_cast<std::size_t>(size), '\0');
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * 2654435761U >> 13);
  return content;
}

/// A sealed folder with one file, "data".
void seal(const fs::path& folder, const std::string& content) {
  SummedFile file(folder, "data");
  file.append(content);
  const std::vector<ListedFile> listed = {file.finish()};
  seal_step(folder, listed);
}

std::string read(CheckedFile& file, std::int64_t offset, std::int64_t length) {
  std::string text(static_cast<std::size_t>(length), '\0');
  file.reader()(offset, text);
  return text;
}

TEST(CheckedFiles, PartsOfAllSizesReadAsTheyWereWritten) {
  for (const std::int64_t size :
       {std::int64_t{0}, std::int64_t{1}, kSummedBlock - 1, kSummedBlock, kSummedBlock + 1, 3 * kSummedBlock + 5}) {
    const TemporaryFolder folder;
    const auto content = content_of_size(size);
    seal(folder.path(), content);
    for (const bool has_sidecar : {true, false}) {
      if (!has_sidecar) fs::remove(folder.path() / kSidecar);
      for (const std::int64_t begin : {std::int64_t{0}, kSummedBlock - 1, kSummedBlock, 2 * kSummedBlock + 3}) {
        for (const std::int64_t length : {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, kSummedBlock, kSummedBlock + 2}) {
          if (begin + length > size) continue;
          CheckedFiles files(folder.path());
          const auto from = static_cast<std::size_t>(begin);
          ASSERT_TRUE(read(files["data"], begin, length) == content.substr(from, static_cast<std::size_t>(length)))
              << begin << " " << length;
        }
      }
      CheckedFiles files(folder.path());
      EXPECT_TRUE(files.read_whole("data", size) == content);
      EXPECT_TRUE(has(message_of([&] { read(files["data"], size, 1); }), "it was cut off"));
    }
  }
}

// Whatever bit changed: who reads its block hears of it, and nobody else.
TEST(CheckedFiles, AChangedBitIsFoundByWhoReadsItsBlock) {
  const TemporaryFolder folder;
  const std::int64_t size = 3 * kSummedBlock + 100;
  seal(folder.path(), content_of_size(size));
  const auto step = folder.path();
  for (const std::int64_t at : {std::int64_t{0}, std::int64_t{70}, kSummedBlock - 1, kSummedBlock, kSummedBlock + kSummedBlock / 2,
                                2 * kSummedBlock - 1, 2 * kSummedBlock, 3 * kSummedBlock, size - 1}) {
    const auto bit = static_cast<int>(at % 8);
    flip_bit(step / "data", at, bit);
    const auto damaged = at / kSummedBlock;
    for (std::int64_t block = 0; block * kSummedBlock < size; ++block) {
      const auto begin = block * kSummedBlock;
      const auto last = std::min(begin + kSummedBlock, size) - 1;
      for (const std::int64_t byte : {begin, last}) {
        CheckedFiles files(step);
        if (block != damaged) {
          files["data"].check(byte, 1);
          continue;
        }
        const auto message = message_of([&] { files["data"].check(byte, 1); });
        EXPECT_TRUE(has(message, "the checkpoint " + step.string() + " is damaged; load an older one: data has the checksum ")) << message;
        EXPECT_TRUE(has(message, " in bytes " + std::to_string(begin) + " to " + std::to_string(last) + ": they changed")) << message;
      }
    }
    CheckedFiles files(step);
    EXPECT_TRUE(has(message_of([&] { files["data"].check(0, size); }), "data has the checksum"));
    EXPECT_TRUE(has(message_of([&] { verify_step(step); }), "data has the checksum"));
    flip_bit(step / "data", at, bit);
    verify_step(step);
  }
}

TEST(CheckedFiles, WhatIsMissingCutOrUnknownIsRefused) {
  const TemporaryFolder folder;
  seal(folder.path(), content_of_size(kSummedBlock + 1));
  folder.write("other", "x");
  CheckedFiles files(folder.path());
  EXPECT_TRUE(has(message_of([&] { files["other"]; }), "does not list the file other"));
  fs::resize_file(folder.path() / "data", kSummedBlock);
  EXPECT_TRUE(has(message_of([&] { files["data"]; }), "data has 1048576 bytes instead of 1048577"));
  fs::remove(folder.path() / "data");
  EXPECT_TRUE(has(message_of([&] { files["data"]; }), "No such file"));
  flip_bit(folder.path() / kSidecar, 20, 0);
  EXPECT_TRUE(has(message_of([&] { CheckedFiles again(folder.path()); }), "is damaged"));
}

TEST(CheckedFiles, ReadsEachBlockOnceAndReportsADiskThatFails) {
  const TemporaryFolder folder;
  seal(folder.path(), content_of_size(2 * kSummedBlock));
  FaultyFiles faulty;
  CheckedFiles files(folder.path(), faulty);
  auto& file = files["data"];
  file.check(kSummedBlock - 1, 1);
  faulty.pread_error = EIO;
  file.check(0, kSummedBlock);
  EXPECT_TRUE(has(message_of([&] { file.check(0, kSummedBlock + 1); }), "Input/output error"));
  faulty.pread_error = 0;
  file.check(0, 2 * kSummedBlock);
}

// Bytes that are kept are compared as they are read, whatever was compared before; those of blocks in part are the memory's.
TEST(CheckedFiles, WhatIsKeptIsComparedOnThatReading) {
  const TemporaryFolder folder;
  const auto content = content_of_size(3 * kSummedBlock + 5);
  seal(folder.path(), content);
  CheckedFiles files(folder.path());
  auto& file = files["data"];
  const auto size = static_cast<std::int64_t>(content.size());
  file.check(0, size);
  std::string kept(content.size(), '\0');
  EXPECT_EQ(file.read(0, kept), crc32(0, content));
  EXPECT_TRUE(kept == content);
  flip_bit(folder.path() / "data", kSummedBlock + 7, 1);
  file.check(0, size);
  EXPECT_TRUE(has(message_of([&] { file.read(0, kept); }), "data has the checksum"));
  EXPECT_TRUE(has(message_of([&] { file.read(kSummedBlock + 9, std::span(kept).first(3)); }), "data has the checksum"));
  file.read(2 * kSummedBlock + 9, std::span(kept).first(3));
  EXPECT_EQ(kept.substr(0, 3), content.substr(2 * kSummedBlock + 9, 3));
  // A file that grows has nothing to be compared with there.
  fs::resize_file(folder.path() / "data", content.size() + 10);
  EXPECT_TRUE(has(message_of([&] { file.read(size - 1, std::span(kept).first(2)); }), "data grew while it was read"));
}

// As a record is read: its end, its beginning, and then all of it.
TEST(CheckedFiles, BlocksThatWereNeededInPartAreStillThere) {
  const TemporaryFolder folder;
  seal(folder.path(), content_of_size(4 * kSummedBlock));
  FaultyFiles faulty;
  CheckedFiles files(folder.path(), faulty);
  auto& file = files["data"];
  const std::int64_t begin = 100;
  const std::int64_t end = 3 * kSummedBlock + 100;
  file.check(end - 22, 22);
  file.check(begin, 30);
  file.check(kSummedBlock, 2 * kSummedBlock);
  faulty.pread_error = EIO;
  file.check(begin, end - begin);
  EXPECT_TRUE(has(message_of([&] { file.check(kSummedBlock, 1); }), "Input/output error")) << "a whole block is not kept";
}

// However it is cut when it is appended: one sum for each piece serves the piece, and the block.
TEST(SummedFile, SumsPiecesAndBlocks) {
  const auto content = content_of_size(3 * kSummedBlock + 5);
  for (const std::int64_t piece :
       {std::int64_t{7777}, kSummedBlock - 1, kSummedBlock, kSummedBlock + 3, 2 * kSummedBlock + 1, std::int64_t{1} << 30}) {
    const TemporaryFolder folder;
    SummedFile file(folder.path(), "data");
    for (std::size_t at = 0; at < content.size();) {
      // Small ones between large ones.
      const auto length = std::min(at % 3 == 1 ? std::size_t{100} : static_cast<std::size_t>(piece), content.size() - at);
      const auto part = std::string_view(content).substr(at, length);
      ASSERT_EQ(file.append(part), crc32(0, part));
      at += length;
      ASSERT_EQ(file.size(), static_cast<std::int64_t>(at));
    }
    const ListedFile listed = file.finish();
    EXPECT_TRUE(read_file(folder.path() / "data") == content);
    ASSERT_EQ(listed.crc32.size(), 4U);
    for (std::size_t block = 0; block < 4; ++block) {
      const auto begin = block * static_cast<std::size_t>(kSummedBlock);
      EXPECT_EQ(listed.crc32[block], crc32(0, std::string_view(content).substr(begin, static_cast<std::size_t>(kSummedBlock))));
    }
  }
}

// Who reads what was checked again can compare it: the sum is that of the bytes asked for, from the middle of one block to that of another.
TEST(CheckedFiles, GiveTheSumOfWhatWasAskedFor) {
  const TemporaryFolder folder;
  const auto content = content_of_size(4 * kSummedBlock + 5);
  seal(folder.path(), content);
  for (const bool has_sidecar : {true, false}) {
    if (!has_sidecar) fs::remove(folder.path() / kSidecar);
    CheckedFiles files(folder.path());
    for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{1}, kSummedBlock - 1, kSummedBlock, 2 * kSummedBlock + 3}) {
      for (const std::int64_t length : {std::int64_t{0}, std::int64_t{1}, kSummedBlock - 1, kSummedBlock, 2 * kSummedBlock + 2}) {
        const auto part = std::string_view(content).substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(length));
        ASSERT_EQ(files["data"].check(begin, length), crc32(0, part)) << begin << " " << length;
      }
    }
  }
}

TEST(ListedFile, LinesAreReadAsTheyAreWritten) {
  for (const ListedFile& listed :
       {ListedFile{"a b", 0, {}}, ListedFile{"__0_0.distcp", 7, {0xdeadbeef}}, ListedFile{" 1 ", kSummedBlock + 1, {0, 0xffffffff}}}) {
    EXPECT_EQ(listed_in(line_of(listed)), listed) << line_of(listed);
  }
  for (const char* line : {"", "7", "7 a", "7 a 1234", "7 a 123456789", "7 a 0000000g", "-7 a 12345678", "7a a 12345678", "0 a 12345678",
                           "1048577 a 12345678", "7 a/b 12345678", "7  12345678", "99999999999999999999 a 12345678"}) {
    EXPECT_TRUE(has(message_of([&] { listed_in(line); }), "is no file's")) << line;
  }
  EXPECT_THROW(line_of({"a\nb", 0, {}}), Error);
  EXPECT_THROW(line_of({"", 0, {}}), Error);
}

}  // namespace checked_files_test
}  // namespace fsdp::ckpt
