#include "checkpoint/check.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/checksum.h"
#include "checkpoint/commit.h"
#include "checkpoint/records.h"
#include "support/temporary_folder.h"

namespace fsdp::ckpt {
namespace check_test {

namespace fs = std::filesystem;

DcpTensor divided(Shape shape, const std::vector<Box>& boxes) {
  DcpTensor tensor{.dtype = Dtype::float32, .shape = std::move(shape), .chunks = {}};
  for (const Box& box : boxes) tensor.chunks.push_back({box, {}});
  return tensor;
}

TEST(Check, BoxesHoldEveryElementOnce) {
  const auto fault = [](Shape shape, const std::vector<Box>& boxes) { return fault_in_boxes(divided(std::move(shape), boxes)); };
  EXPECT_EQ(fault({}, {{{}, {}}}), "");
  EXPECT_EQ(fault({}, {}), "its parts have 0 of 1 elements");
  EXPECT_EQ(fault({}, {{{}, {}}, {{}, {}}}), "two of its parts overlap");
  EXPECT_EQ(fault({0, 3}, {whole({0, 3})}), "");
  EXPECT_EQ(fault({0, 3}, {}), "");
  EXPECT_EQ(fault({4, 3}, {{{2, 0}, {2, 3}}, {{0, 0}, {2, 1}}, {{0, 1}, {2, 2}}}), "");
  EXPECT_EQ(fault({4, 3}, {{{0, 0}, {2, 3}}, {{2, 0}, {1, 3}}}), "its parts have 9 of 12 elements");
  // As many elements as there should be, but not these.
  EXPECT_EQ(fault({4, 3}, {{{0, 0}, {2, 3}}, {{1, 0}, {2, 3}}}), "two of its parts overlap");
  EXPECT_EQ(fault({4, 3}, {{{0, 0}, {4, 1}}, {{1, 1}, {1, 2}}, {{3, 0}, {2, 3}}}), "two of its parts overlap");
  // However a tensor is cut among ranks.
  const Shape shape = {5, 3, 4};
  for (std::int64_t length = 1; length <= 60; ++length) {
    std::vector<Box> boxes;
    for (std::int64_t offset = 0; offset < 60; offset += length) {
      for (Box& box : boxes_of_slice(shape, offset, std::min(length, 60 - offset))) boxes.push_back(std::move(box));
    }
    EXPECT_EQ(fault(shape, boxes), "") << length;
    boxes.pop_back();
    EXPECT_NE(fault(shape, boxes), "") << length;
  }
}

/// A checkpoint of a tensor and a value, whose metadata `change` has touched before they are written.
template <typename Change>
Findings check_with(Change change) {
  const testing::TemporaryFolder folder;
  const fs::path step = folder.path() / "1";
  const TemporaryStep lease = begin_step(step);
  const fs::path& temporary = lease.path();
  SummedFile file(temporary, "__0_0.distcp");
  const std::string data(48, 'x');
  const TensorRecord record(Dtype::float32, {4, 3});
  DcpTensor tensor{.dtype = Dtype::float32, .shape = {4, 3}, .chunks = {{whole({4, 3}), {"__0_0.distcp", 0, record.length()}}}};
  file.append(record.head());
  file.append(data);
  file.append(record.tail(crc32(0, data)));
  const std::string object = object_record({std::int64_t{7}});
  DcpObject value{{"__0_0.distcp", file.size(), static_cast<std::int64_t>(object.size())}};
  file.append(object);
  change(tensor, value);
  const std::vector<ListedFile> listed = {file.finish(), [&] {
                                            SummedFile metadata(temporary, std::string(kMetadataFile));
                                            metadata.append(write_dcp_metadata({.items = {{"w", tensor}, {"n", value}}, .paths = {}}));
                                            return metadata.finish();
                                          }()};
  seal_step(temporary, listed);
  commit_step(temporary, step);
  return check_dcp(step);
}

void expect_fault(const Findings& findings, const std::string& part) {
  ASSERT_EQ(findings.faults.size(), 1U);
  EXPECT_NE(findings.faults[0].find(part), std::string::npos) << findings.faults[0];
}

TEST(Check, RecordsAreWhereTheMetadataSay) {
  const Findings good = check_with([](DcpTensor&, DcpObject&) {});
  EXPECT_EQ(good.faults, std::vector<std::string>());
  EXPECT_TRUE(good.has_checksums);
  EXPECT_EQ(good.files, 2);
  EXPECT_EQ(good.tensors, 1);
  EXPECT_EQ(good.values, 1);

  expect_fault(check_with([](DcpTensor& tensor, DcpObject&) { tensor.dtype = Dtype::int32; }), "the checkpoint's metadata says int32");
  expect_fault(check_with([](DcpTensor& tensor, DcpObject&) { tensor.chunks[0].record.offset = 64; }), "__0_0.distcp");
  expect_fault(check_with([](DcpTensor& tensor, DcpObject&) { tensor.chunks[0].record.length = 1 << 20; }), "cut off");
  expect_fault(check_with([](DcpTensor& tensor, DcpObject&) { tensor.chunks[0].record.file = "other.distcp"; }), "No such file");
  expect_fault(check_with([](DcpTensor& tensor, DcpObject&) { tensor.shape = {5, 3}; }), "'w': its parts have 12 of 15 elements");
  expect_fault(check_with([](DcpTensor&, DcpObject& value) { value.record.length -= 1; }), "__0_0.distcp");
}

TEST(Check, NothingThereIsAFault) {
  const testing::TemporaryFolder folder;
  expect_fault(check_dcp(folder.path()), "No such file");
}

}  // namespace check_test
}  // namespace fsdp::ckpt
