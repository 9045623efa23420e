#include "checkpoint/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/output_file.h"
#include "fsdp/error.h"
#include "support/faulty_files.h"
#include "support/messages.h"
#include "support/python_peer.h"

namespace fsdp::ckpt {
namespace files_test {

using fsdp::testing::FaultyFiles;
using fsdp::testing::message_of;
using fsdp::testing::read_file;
using fsdp::testing::TemporaryFolder;

TEST(Files, ShortAndInterruptedTransfersAreContinued) {
  const TemporaryFolder folder;
  FaultyFiles files;
  files.most_at_once = 3;
  files.interrupts = true;
  const std::string text = "as many bytes as there are letters here";
  write_whole(folder.path() / "f", text, files);
  EXPECT_EQ(read_file(folder.path() / "f"), text);
  EXPECT_EQ(read_whole(folder.path() / "f", 100, files), text);
  sync_folder(folder.path(), files);
}

TEST(Files, RangesInAnyOrder) {
  const TemporaryFolder folder;
  File file = File::create(folder.path() / "f");
  file.write_at(5, std::string_view("world"));
  File::open_to_write(folder.path() / "f").write_at(0, std::string_view("hello"));
  EXPECT_EQ(file.size(), 10);
  std::string middle(4, ' ');
  file.reader()(3, middle);
  EXPECT_EQ(middle, "lowo");
  EXPECT_EQ(message_of([&] { file.read_at(8, middle); }),
            (folder.path() / "f").string() + " ends at byte 10, but 2 more were to be read there: it was cut off");
}

TEST(Files, ErrorsCarryPathAndReason) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "f").string();
  const auto error_with = [&](auto set) {
    FaultyFiles files;
    set(files);
    return message_of([&] { write_whole(path, "0123456789", files); });
  };
  EXPECT_EQ(error_with([](FaultyFiles& files) { files.space = 4; }), "cannot write " + path + ": No space left on device");
  EXPECT_EQ(error_with([](FaultyFiles& files) { files.pwrite_error = EIO; }), "cannot write " + path + ": Input/output error");
  EXPECT_EQ(error_with([](FaultyFiles& files) { files.fsync_error = EIO; }), "cannot sync " + path + ": Input/output error");
  EXPECT_EQ(error_with([](FaultyFiles& files) { files.close_error = EDQUOT; }), "cannot close " + path + ": Disk quota exceeded");
  FaultyFiles files;
  files.pread_error = EIO;
  EXPECT_EQ(message_of([&] { read_whole(path, 100, files); }), "cannot read " + path + ": Input/output error");
  EXPECT_EQ(message_of([&] { read_whole(path, 3); }), path + " has 10 bytes; more than 3 cannot be right");
  EXPECT_EQ(message_of([&] { File::open(path + "x"); }), "cannot open " + path + "x: No such file or directory");
  EXPECT_EQ(message_of([&] { File::create(path + "/x"); }), "cannot create " + path + "/x: Not a directory");
  EXPECT_EQ(message_of([&] { make_folder(path); }), "cannot create the folder " + path + ": File exists");
  EXPECT_EQ(message_of([&] { list_folder(path + "x"); }), "cannot list " + path + "x: No such file or directory");
}

TEST(Files, RemoveTreeFollowsNoLinks) {
  const TemporaryFolder folder;
  folder.write("keep/file", "x");
  folder.write("remove/deep/er/file", "x");
  std::filesystem::create_directory_symlink(folder.path() / "keep", folder.path() / "remove/link");
  remove_tree(folder.path() / "remove");
  remove_tree(folder.path() / "remove");
  EXPECT_EQ(list_folder(folder.path()), std::vector<std::string>{"keep"});
  EXPECT_EQ(list_folder(folder.path() / "keep"), std::vector<std::string>{"file"});
}

TEST(OutputFiles, AreCompleteOrNotThere) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "page.html";
  write_output(path, "one");
  struct stat before {};
  ASSERT_EQ(::stat(path.c_str(), &before), 0);
  write_output(path, "two");
  struct stat after {};
  ASSERT_EQ(::stat(path.c_str(), &after), 0);
  EXPECT_NE(before.st_ino, after.st_ino) << "written beside and renamed";
  EXPECT_EQ(read_file(path), "two");
  const auto beside_none = folder.path() / "none" / "page.html";
  EXPECT_EQ(message_of([&] { write_output(beside_none, "x"); }), "cannot write " + beside_none.string() + ": No such file or directory");
  std::filesystem::create_directory(folder.path() / "folder");
  EXPECT_THROW(write_output(folder.path() / "folder", "x"), Error);
  EXPECT_EQ(list_folder(folder.path()), (std::vector<std::string>{"folder", "page.html"})) << "nothing is left beside them";
}

TEST(OutputFiles, GoWhereLinksLead) {
  const TemporaryFolder folder;
  folder.write("real/page", "old");
  std::filesystem::create_symlink("real", folder.path() / "folder");
  std::filesystem::create_symlink("folder/page", folder.path() / "link");
  std::filesystem::create_symlink(folder.path() / "link", folder.path() / "to_link");
  std::filesystem::create_symlink("real/new", folder.path() / "dangling");
  std::filesystem::create_symlink("circle", folder.path() / "circle");
  write_output(folder.path() / "to_link", "text");
  write_output(folder.path() / "dangling", "more");
  EXPECT_EQ(read_file(folder.path() / "real/page"), "text");
  EXPECT_EQ(read_file(folder.path() / "real/new"), "more");
  EXPECT_THROW(write_output(folder.path() / "circle", "x"), Error);
  for (const char* name : {"link", "to_link", "dangling", "circle"}) EXPECT_TRUE(std::filesystem::is_symlink(folder.path() / name)) << name;
  EXPECT_EQ(list_folder(folder.path() / "real"), (std::vector<std::string>{"new", "page"}));
}

// As /dev/null and `--json /dev/stdout | jq`.
TEST(OutputFiles, ArePassedToWhatIsNoRegularFile) {
  const TemporaryFolder folder;
  const auto fifo = (folder.path() / "fifo").string();
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_TRUE(is_written_in_place(fifo));
  EXPECT_FALSE(is_written_in_place(folder.path() / "file"));
  std::string received;
  std::thread reader([&] { received = read_file(fifo); });
  write_output(fifo, "through the pipe");
  reader.join();
  EXPECT_EQ(received, "through the pipe");
  EXPECT_TRUE(std::filesystem::is_fifo(fifo));
  // A descriptor goes on where it is.
  const auto path = (folder.path() / "file").string();
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT, 0600);
  ASSERT_EQ(::write(file, "before ", 7), 7);
  write_output("/dev/fd/" + std::to_string(file), "text");
  ASSERT_EQ(::write(file, " after", 6), 6);
  ::close(file);
  EXPECT_EQ(read_file(path), "before text after");
  EXPECT_EQ(list_folder(folder.path()), (std::vector<std::string>{"fifo", "file"}));
}

}  // namespace files_test
}  // namespace fsdp::ckpt
