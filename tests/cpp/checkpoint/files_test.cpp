#include "checkpoint/files.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <string>

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

}  // namespace files_test
}  // namespace fsdp::ckpt
