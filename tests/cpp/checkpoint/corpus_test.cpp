// What torch writes is read with the values that it was given, whichever version wrote it.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/boxes.h"
#include "checkpoint/check.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/python_value.h"
#include "checkpoint/records.h"
#include "support/python_peer.h"

namespace fsdp::ckpt {
namespace corpus_test {

namespace fs = std::filesystem;

/// A tensor as "<dtype> [<shape>] <bytes>", a value as Python prints it.
using Contents = std::map<std::string, std::string>;

std::string tensor_text(Dtype dtype, const Shape& shape, const std::string& data) {
  std::string text = std::string(names_of(dtype).name) + " [";
  for (const std::int64_t size : shape) text += std::to_string(size) + " ";
  return text + "] " + data;
}

/// The tensor of the numbers from 0 up.
template <typename Number>
std::string range_text(Dtype dtype, const Shape& shape) {
  std::string data;
  for (std::int64_t k = 0; k < numel(shape); ++k) {
    const auto number = static_cast<Number>(k);
    data.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  return tensor_text(dtype, shape, data);
}

/// All that a checkpoint says, read box by box.
Contents contents_of(const fs::path& folder) {
  Contents contents;
  const auto file = folder / kMetadataFile;
  for (const DcpItem& item : read_dcp_metadata(fsdp::testing::read_file(file), file.string()).items) {
    if (const auto* object = std::get_if<DcpObject>(&item.content)) {
      contents[item.name] = repr(read_object(File::open(folder / object->record.file).reader(), object->record, item.name));
      continue;
    }
    const auto& tensor = std::get<DcpTensor>(item.content);
    const std::int64_t size = itemsize(tensor.dtype);
    std::string whole_data(static_cast<std::size_t>(numel(tensor.shape) * size), '?');
    for (const auto& chunk : tensor.chunks) {
      const File records = File::open(folder / chunk.record.file);
      const TensorData found = locate_tensor(records.reader(), chunk.record, item.name, tensor.dtype, chunk.box.sizes);
      std::string data(static_cast<std::size_t>(found.length), '\0');
      records.read_at(found.offset, data);
      for (const Run& run : runs_to_box(chunk.box, whole(tensor.shape))) {
        std::memcpy(whole_data.data() + run.destination * size, data.data() + run.source * size,
                    static_cast<std::size_t>(run.length * size));
      }
    }
    contents[item.name] = tensor_text(tensor.dtype, tensor.shape, whole_data);
  }
  return contents;
}

/// As state() of checkpoint_peer.py says.
Contents expected_of_one_rank() {
  const float scalar = 2.5F;
  Contents expected = {
      {"shapes.0.scalar", tensor_text(Dtype::float32, {}, std::string(reinterpret_cast<const char*>(&scalar), sizeof(scalar)))},
      {"shapes.0.empty", tensor_text(Dtype::float32, {0, 3}, "")},
      {"shapes.0.cube", range_text<float>(Dtype::float32, {2, 3, 4})},
      {"shapes.1", "'between'"},
      {"shapes.2", "3"},
      {"plain.list", "[[], [[]]]"},
      {"none", "None"},
      {"pi", "3.25"},
  };
  for (const DtypeNames& names : dtypes()) {
    std::string data;
    for (std::int64_t k = 0; k < 6 * names.itemsize; ++k) data += static_cast<char>(k % (names.dtype == Dtype::boolean ? 2 : 251));
    expected["dtypes." + std::string(names.name)] = tensor_text(names.dtype, {2, 3}, data);
  }
  return expected;
}

/// As two_ranks() of checkpoint_peer.py says.
Contents expected_of_two_ranks() {
  return {
      {"rows", range_text<float>(Dtype::float32, {5, 3})},
      {"few", range_text<float>(Dtype::float32, {1, 3})},
      {"columns", range_text<std::int64_t>(Dtype::int64, {2, 4})},
      {"step", "7"},
  };
}

/// But for `left_out`, which came later.
void expect_written_by_torch(const fs::path& folder, const std::string& left_out = "") {
  Contents of_one_rank = expected_of_one_rank();
  of_one_rank.erase(left_out);
  for (const auto& [name, expected] : {std::pair{"one_rank", of_one_rank}, {"two_ranks", expected_of_two_ranks()}}) {
    SCOPED_TRACE(folder / name);
    EXPECT_EQ(contents_of(folder / name), expected);
    const Findings findings = check_dcp(folder / name);
    EXPECT_EQ(findings.faults, std::vector<std::string>());
    EXPECT_EQ(findings.only_for_python, std::vector<std::string>());
  }
}

TEST(Corpus, OfTheInstalledTorchIsReadExactly) {
  const fsdp::testing::TemporaryFolder folder;
  fsdp::testing::run_python("write_one_rank", folder.path());
  fsdp::testing::run_python("write_two_ranks", folder.path());
  expect_written_by_torch(folder.path());
}

TEST(Corpus, OfTorch215IsReadExactly) { expect_written_by_torch(fs::path(fsdp::testing::kCorpus) / "torch-2.15"); }

TEST(Corpus, OfTorch211IsReadExactly) {
  expect_written_by_torch(fs::path(fsdp::testing::kCorpus) / "torch-2.11", "dtypes.float4_e2m1fn_x2");
}

}  // namespace corpus_test
}  // namespace fsdp::ckpt
