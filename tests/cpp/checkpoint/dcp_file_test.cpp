#include "checkpoint/dcp_file.h"

#include <gtest/gtest.h>

#include <string>
#include <variant>

#include "checkpoint/records.h"
#include "support/messages.h"
#include "support/python_peer.h"

namespace fsdp::ckpt {
namespace dcp_file_test {

using fsdp::testing::read_file;
using fsdp::testing::TemporaryFolder;

// Whatever stands between them, and however long: copies between a file and memory are slower where the one is not aligned.
TEST(DcpFile, TensorsDataAreAlignedInTheFile) {
  const TemporaryFolder folder;
  DcpFile file(folder.path(), "data");
  const std::string bytes = "1234567";
  for (std::int64_t count = 1; count <= 7; ++count) {
    const std::string name = "tensor " + std::to_string(count);
    file.add_tensor(name, {name}, Dtype::uint8, {count});
    file.add_box({.offsets = {0}, .sizes = {count}},
                 [&](const DcpFile::Append& append) { append(std::string_view(bytes).substr(0, static_cast<std::size_t>(count))); });
    file.add_value("value " + std::to_string(count), {"value", std::to_string(count)}, {std::string(static_cast<std::size_t>(count), 'x')});
  }
  const DcpMetadata metadata = file.take_metadata();
  const ListedFile listed = file.finish();
  const std::string content = read_file(folder.path() / "data");
  EXPECT_EQ(static_cast<std::int64_t>(content.size()), listed.size);
  const File written = File::open(folder.path() / "data");
  std::int64_t tensors = 0;
  for (const DcpItem& item : metadata.items) {
    const auto* tensor = std::get_if<DcpTensor>(&item.content);
    if (tensor == nullptr) continue;
    const TensorData data = locate_tensor(written.reader(), tensor->chunks.at(0).record, item.name);
    EXPECT_EQ(data.offset % 64, 0) << item.name;
    EXPECT_EQ(content.substr(static_cast<std::size_t>(data.offset), static_cast<std::size_t>(data.length)),
              bytes.substr(0, static_cast<std::size_t>(++tensors)));
  }
  EXPECT_EQ(tensors, 7);
}

}  // namespace dcp_file_test
}  // namespace fsdp::ckpt
