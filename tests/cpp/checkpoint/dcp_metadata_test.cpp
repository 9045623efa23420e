#include "checkpoint/dcp_metadata.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>

#include "fsdp/error.h"
#include "support/messages.h"
#include "support/python_peer.h"

namespace fsdp::ckpt {
namespace dcp_metadata_test {

using fsdp::testing::message_of;
using fsdp::testing::read_file;
using fsdp::testing::run_python;
using fsdp::testing::TemporaryFolder;
using namespace std::string_literals;

const DcpItem* find(const DcpMetadata& metadata, const std::string& name) {
  for (const DcpItem& item : metadata.items) {
    if (item.name == name) return &item;
  }
  return nullptr;
}

const DcpTensor& tensor(const DcpMetadata& metadata, const std::string& name) {
  const DcpItem* item = find(metadata, name);
  if (item == nullptr) throw Error("no " + name);
  return std::get<DcpTensor>(item->content);
}

std::vector<Box> boxes(const DcpTensor& tensor) {
  std::vector<Box> result;
  for (const DcpTensor::Chunk& chunk : tensor.chunks) result.push_back(chunk.box);
  return result;
}

DcpMetadata read(const std::filesystem::path& folder) {
  const auto file = folder / kMetadataFile;
  return read_dcp_metadata(read_file(file), file.string());
}

TEST(DcpMetadata, BothWaysWithPython) {
  const TemporaryFolder folder;
  run_python("write_one_rank", folder.path());
  run_python("write_two_ranks", folder.path());

  const DcpMetadata one = read(folder.path() / "one_rank");
  for (const DtypeNames& names : dtypes()) {
    const DcpTensor& found = tensor(one, "dtypes." + std::string(names.name));
    EXPECT_EQ(found.dtype, names.dtype);
    EXPECT_EQ(found.shape, (Shape{2, 3}));
    ASSERT_EQ(boxes(found), std::vector<Box>{whole({2, 3})});
    EXPECT_EQ(found.chunks[0].record.file, "__0_0.distcp");
    EXPECT_GT(found.chunks[0].record.length, 6 * names.itemsize);
  }
  EXPECT_EQ(boxes(tensor(one, "shapes.0.scalar")), std::vector<Box>{whole({})});
  EXPECT_EQ(boxes(tensor(one, "shapes.0.empty")), std::vector<Box>{whole({0, 3})});
  ASSERT_NE(find(one, "none"), nullptr);
  EXPECT_GT(std::get<DcpObject>(find(one, "none")->content).record.length, 0);
  const std::map<std::string, DcpPath> paths(one.paths.begin(), one.paths.end());
  EXPECT_EQ(paths.at("shapes.0.cube"), (DcpPath{"shapes", std::int64_t{0}, "cube"}));

  const DcpMetadata two = read(folder.path() / "two_ranks");
  EXPECT_EQ(boxes(tensor(two, "rows")), (std::vector<Box>{{{0, 0}, {3, 3}}, {{3, 0}, {2, 3}}}));
  EXPECT_EQ(boxes(tensor(two, "columns")), (std::vector<Box>{{{0, 0}, {2, 2}}, {{0, 2}, {2, 2}}}));
  EXPECT_EQ(tensor(two, "rows").chunks[0].record.file, "__0_0.distcp");
  EXPECT_EQ(tensor(two, "rows").chunks[1].record.file, "__1_0.distcp");

  for (const char* name : {"one_rank", "two_ranks"}) {
    const DcpMetadata metadata = read(folder.path() / name);
    folder.write(name + ".again/.metadata"s, write_dcp_metadata(metadata));
    EXPECT_EQ(read(folder.path() / (name + ".again"s)), metadata);
  }
  run_python("check_rewritten", folder.path());
}

// Debian 12's Python, 3.11.2, does so.
TEST(DcpMetadata, OfAPythonThatWritesEnumsByName) {
  const TemporaryFolder folder;
  run_python("write_enums_by_name", folder.path());
  EXPECT_NE(read_file(folder.path() / "one_rank/.metadata").find("getattr"), std::string::npos);
  const DcpMetadata one = read(folder.path() / "one_rank");
  EXPECT_EQ(tensor(one, "dtypes." + std::string(dtypes().front().name)).shape, (Shape{2, 3}));
}

DcpMetadata two_items() {
  DcpMetadata metadata;
  metadata.items = {
      {"w", DcpTensor{Dtype::float32, {4, 2}, {{{{0, 0}, {3, 2}}, {"__0_0.distcp", 0, 100}}, {{{3, 0}, {1, 2}}, {"__1_0.distcp", 0, 90}}}}},
      {"step", DcpObject{{"__0_0.distcp", 100, 50}}},
  };
  metadata.paths = {{"w", {"w"}}, {"step", {"step"}}};
  return metadata;
}

std::string error_of(const DcpMetadata& metadata) {
  return message_of([&] { read_dcp_metadata(write_dcp_metadata(metadata), "F/.metadata"); });
}

TEST(DcpMetadata, DamageIsAnErrorWithNames) {
  const DcpMetadata good = two_items();
  ASSERT_EQ(read_dcp_metadata(write_dcp_metadata(good), "F"), good);

  for (const char* file : {"/etc/passwd", "../other", "..", ".", "a/b"}) {
    DcpMetadata metadata = good;
    std::get<DcpObject>(metadata.items[1].content).record.file = file;
    EXPECT_NE(error_of(metadata).find("expected the name of a file in the checkpoint's folder, found the string '"s + file),
              std::string::npos);
  }
  DcpMetadata metadata = good;
  std::get<DcpTensor>(metadata.items[0].content).chunks[1].box.sizes = {2, 2};
  EXPECT_EQ(error_of(metadata), "F/.metadata: tensor 'w': a box of sizes [2, 2] at [3, 0] does not lie in a tensor of shape [4, 2]");
  metadata = good;
  std::get<DcpTensor>(metadata.items[0].content).chunks[1].record = {};
  EXPECT_EQ(error_of(metadata), "F/.metadata: tensor 'w': no record is listed for one of its 2 boxes; the checkpoint is damaged");
  metadata = good;
  std::get<DcpTensor>(metadata.items[0].content).shape = {std::int64_t{1} << 62, 4};
  EXPECT_NE(error_of(metadata).find("more than 2^63 - 1 elements"), std::string::npos);
  metadata = good;
  std::get<DcpTensor>(metadata.items[0].content).chunks[0].box.offsets[0] = -1;
  EXPECT_NE(error_of(metadata).find("expected a size of 0 or more, found the integer -1"), std::string::npos);
  metadata = good;
  std::get<DcpObject>(metadata.items[1].content).record.length = -1;
  EXPECT_NE(error_of(metadata).find("expected a length of 0 or more, found the integer -1"), std::string::npos);
  metadata = good;
  metadata.items.push_back(metadata.items[0]);
  EXPECT_NE(error_of(metadata).find("expected each name once, found the string 'w'"), std::string::npos);

  const std::string whole_text = write_dcp_metadata(good);
  for (std::size_t length = 0; length < whole_text.size(); ++length) {
    EXPECT_THROW(read_dcp_metadata(std::string_view(whole_text).substr(0, length), "F"), Error) << length;
  }
  EXPECT_THROW(read_dcp_metadata("\x80\x02N."s, "F"), Error);
}

}  // namespace dcp_metadata_test
}  // namespace fsdp::ckpt
