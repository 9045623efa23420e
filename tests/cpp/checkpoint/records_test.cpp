#include "checkpoint/records.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "checkpoint/check.h"
#include "checkpoint/checksum.h"
#include "checkpoint/zip.h"
#include "fsdp/error.h"
#include "support/messages.h"
#include "support/python_peer.h"

namespace fsdp::ckpt {
namespace records_test {

using fsdp::testing::message_of;
using fsdp::testing::read_file;
using fsdp::testing::run_python;
using fsdp::testing::TemporaryFolder;
using namespace std::string_literals;

/// As in state() of checkpoint_peer.py.
std::string bytes_of_dtype(const DtypeNames& names) {
  std::string data;
  for (std::int64_t k = 0; k < 6 * names.itemsize; ++k) data += static_cast<char>(k % (names.dtype == Dtype::boolean ? 2 : 251));
  return data;
}

std::string floats(std::vector<float> values) {
  std::string data(values.size() * sizeof(float), '\0');
  if (!data.empty()) std::memcpy(data.data(), values.data(), data.size());
  return data;
}

std::string record_of(Dtype dtype, const Shape& sizes, std::string_view data) {
  const TensorRecord record(dtype, sizes);
  EXPECT_EQ(record.data_length(), static_cast<std::int64_t>(data.size()));
  EXPECT_EQ(record.data_offset() % 64, 0);
  std::string all = record.head() + std::string(data) + record.tail(crc32(0, data));
  EXPECT_EQ(record.length(), static_cast<std::int64_t>(all.size()));
  return all;
}

ReadAt reader_of(const std::string& text) {
  return [&text](std::int64_t offset, std::span<char> to) {
    ASSERT_GE(offset, 0);
    ASSERT_LE(static_cast<std::size_t>(offset) + to.size(), text.size());
    if (!to.empty()) std::memcpy(to.data(), text.data() + offset, to.size());
  };
}

RecordLocation all_of(const std::string& text) { return {"F", 0, static_cast<std::int64_t>(text.size())}; }

TEST(Records, PythonLoadsWhatIsWritten) {
  const TemporaryFolder folder;
  for (const DtypeNames& names : dtypes()) {
    folder.write(std::string(names.name), record_of(names.dtype, {2, 3}, bytes_of_dtype(names)));
  }
  folder.write("scalar", record_of(Dtype::float32, {}, floats({2.5F})));
  folder.write("empty", record_of(Dtype::float32, {0, 3}, ""));
  std::vector<float> cube;
  for (int i = 0; i < 24; ++i) cube.push_back(static_cast<float>(i));
  folder.write("cube", record_of(Dtype::float32, {2, 3, 4}, floats(cube)));

  run_python("write_pickles", folder.path());
  const std::string plain = read_file(folder.path() / "plain.2");
  const Pickle pickle(plain, "plain", kPlainGlobals);
  const PythonValue value = python_value(pickle.root(), plain.size());
  const std::string record = object_record(value);
  EXPECT_EQ(read_object(reader_of(record), all_of(record), "plain"), value);
  folder.write("plain", record);
  run_python("check_records", folder.path());
}

/// Appends records to a file, as a rank does.
class RecordFile {
 public:
  explicit RecordFile(const std::filesystem::path& folder, std::string name) : file_(File::create(folder / name)), name_(std::move(name)) {}

  RecordLocation add(Dtype dtype, const Shape& sizes, std::string_view data) { return add(record_of(dtype, sizes, data)); }
  RecordLocation add(const std::string& record) {
    const RecordLocation location{name_, end_, static_cast<std::int64_t>(record.size())};
    file_.write_at(end_, record);
    end_ += location.length;
    return location;
  }

 private:
  File file_;
  std::string name_;
  std::int64_t end_ = 0;
};

TEST(Records, OfPythonAreReadAndWrittenAgain) {
  const TemporaryFolder folder;
  run_python("write_one_rank", folder.path());
  const auto source = folder.path() / "one_rank";
  DcpMetadata metadata = read_dcp_metadata(read_file(source / kMetadataFile), source.string());
  const File file = File::open(source / "__0_0.distcp");
  std::filesystem::create_directory(folder.path() / "copied");
  RecordFile copies(folder.path() / "copied", "__0_0.distcp");

  for (DcpItem& item : metadata.items) {
    if (auto* object = std::get_if<DcpObject>(&item.content)) {
      object->record = copies.add(object_record(read_object(file.reader(), object->record, item.name)));
      continue;
    }
    auto& tensor = std::get<DcpTensor>(item.content);
    ASSERT_EQ(tensor.chunks.size(), 1U);
    const TensorData found = locate_tensor(file.reader(), tensor.chunks[0].record, item.name, tensor.dtype, tensor.shape);
    std::string data(static_cast<std::size_t>(found.length), '\0');
    file.read_at(found.offset, data);
    if (item.name.starts_with("dtypes.")) {
      EXPECT_EQ(data, bytes_of_dtype(names_of(tensor.dtype)));
    }
    // The cube as three ranks would hold it, in flat slices that cut rows.
    std::vector<Box> boxes = {whole(tensor.shape)};
    if (item.name == "shapes.0.cube") {
      boxes.clear();
      for (const auto& [offset, count] : {std::pair{0, 5}, {5, 12}, {17, 7}}) {
        for (const Box& box : boxes_of_slice(tensor.shape, offset, count)) boxes.push_back(box);
      }
      EXPECT_EQ(boxes.size(), 8U);
    }
    tensor.chunks.clear();
    std::size_t begin = 0;
    for (const Box& box : boxes) {
      const auto length = static_cast<std::size_t>(numel(box.sizes) * itemsize(tensor.dtype));
      tensor.chunks.push_back({box, copies.add(tensor.dtype, box.sizes, std::string_view(data).substr(begin, length))});
      begin += length;
    }
  }
  folder.write("copied/.metadata", write_dcp_metadata(metadata));
  run_python("check_copied", folder.path());
}

TEST(Records, OfMoreThan4GiB) {
  const TemporaryFolder folder;
  constexpr std::int64_t kSize = std::int64_t{5} << 30;
  const TensorRecord record(Dtype::uint8, {kSize});
  File file = File::create(folder.path() / "huge");
  file.write_at(0, record.head());
  file.write_at(record.data_offset() + kSize - 1, std::string_view("\x07"));
  // The checksum of zeros and a last 7, without going through them.
  constexpr std::int64_t kZeros = std::int64_t{1} << 20;
  const std::uint32_t zeros = crc32(0, std::string(kZeros, '\0'));
  std::uint32_t sum = 0;
  for (std::int64_t done = 0; done + kZeros < kSize; done += kZeros) sum = combine_crc32(sum, zeros, kZeros);
  sum = crc32(crc32(sum, std::string(kZeros - 1, '\0')), std::string(1, '\7'));
  file.write_at(record.data_offset() + kSize, record.tail(sum));
  EXPECT_EQ(file.size(), record.length());
  const TensorData found = locate_tensor(file.reader(), {"huge", 0, record.length()}, "huge");
  EXPECT_EQ(found.offset, record.data_offset());
  EXPECT_EQ(found.length, kSize);
  EXPECT_EQ(found.stored.crc32, sum);
  // It is the true one: all of it is read.
  DcpTensor tensor{.dtype = Dtype::uint8, .shape = {kSize}, .chunks = {{whole({kSize}), {"huge", 0, record.length()}}}};
  folder.write(".metadata", write_dcp_metadata({.items = {{"w", tensor}}, .paths = {}}));
  EXPECT_EQ(check_dcp(folder.path()).faults, std::vector<std::string>());
  run_python("check_huge", folder.path());
}

TEST(Records, LocatingReadsLittle) {
  const TensorRecord record(Dtype::bfloat16, {1000, 1000});
  const std::string all = record_of(Dtype::bfloat16, {1000, 1000}, std::string(2000000, 'x'));
  std::size_t bytes = 0;
  int reads = 0;
  const ReadAt counting = [&](std::int64_t offset, std::span<char> to) {
    bytes += to.size();
    ++reads;
    reader_of(all)(offset, to);
  };
  locate_tensor(counting, all_of(all), "w");
  EXPECT_EQ(reads, 2);
  EXPECT_LE(bytes, 2048U);
}

std::string error_of(const std::string& record) {
  return message_of([&] { locate_tensor(reader_of(record), all_of(record), "w", Dtype::float32, {2}); });
}

TEST(Records, DamageIsAnErrorWithNames) {
  const std::string good = record_of(Dtype::float32, {2}, floats({1, 2}));
  EXPECT_EQ(locate_tensor(reader_of(good), all_of(good), "w", Dtype::float32, {2}).length, 8);

  EXPECT_NE(
      error_of(record_of(Dtype::int32, {2}, floats({1, 2}))).find("F, record of 'w' at byte 0: it is a tensor of int32 with 2 elements"),
      std::string::npos);
  EXPECT_NE(error_of(record_of(Dtype::float32, {1, 2}, floats({1, 2}))).find("the checkpoint is damaged"), std::string::npos);
  EXPECT_EQ(error_of(object_record({std::int64_t{1}})), "F, record of 'w', byte 2: expected a tensor, found the integer 1");
  EXPECT_NE(message_of([&] { read_object(reader_of(good), all_of(good), "step"); }).find("the global 'torch._utils._rebuild_tensor_v2'"),
            std::string::npos);
  // Values have checksums, too.
  std::string value = object_record({std::string("a value")});
  value[value.find("a value")] = 'b';
  EXPECT_EQ(message_of([&] { read_object(reader_of(value), all_of(value), "v"); }),
            "F, record of 'v' at byte 0: entry 'data.pkl' is damaged: it has another checksum");
  EXPECT_NE(error_of("").find("does not end as a zip archive does"), std::string::npos);
  for (std::size_t length = 0; length < good.size(); ++length) EXPECT_FALSE(error_of(good.substr(0, length)).empty());

  ZipWriter compressed;
  compressed.add("data.pkl", "x");
  compressed.finish();
  std::string text = compressed.take();
  text[text.find("PK\x01\x02") + 10] = 8;
  EXPECT_EQ(error_of(text), "F, record of 'w' at byte 0: entry 'data.pkl' is compressed, which torch.save never does");

  ZipWriter big_endian;
  big_endian.add("byteorder", "big");
  big_endian.finish();
  EXPECT_EQ(error_of(big_endian.take()), "F, record of 'w' at byte 0: its data are not little-endian");
}

// Any one byte may be wrong: an Error or a place within the record, never more.
TEST(Records, EveryFlippedByteIsHarmless) {
  const std::string good = record_of(Dtype::float8_e4m3fn, {2, 2}, "abcd");
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (const char flip : {'\x01', '\x80', '\xFF'}) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ flip);
      try {
        const TensorData found = locate_tensor(reader_of(bad), all_of(bad), "w");
        ASSERT_GE(found.offset, 0);
        ASSERT_LE(found.offset + found.length, static_cast<std::int64_t>(bad.size()));
      } catch (const Error&) {
      }
    }
  }
}

}  // namespace records_test
}  // namespace fsdp::ckpt
