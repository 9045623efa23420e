#include "checkpoint/dcp_file.h"

#include <utility>

#include "checkpoint/checksum.h"
#include "checkpoint/records.h"
#include "checkpoint/zip.h"

namespace fsdp::ckpt {

DcpFile::DcpFile(const std::filesystem::path& folder, const std::string& name, FileSystem& files)
    : name_(name), file_(folder, name, files) {}

void DcpFile::add_tensor(const std::string& name, const DcpPath& path, Dtype dtype, const Shape& shape) {
  metadata_.items.push_back({name, DcpTensor{.dtype = dtype, .shape = shape, .chunks = {}}});
  metadata_.paths.emplace_back(name, path);
}

void DcpFile::add_box(const Box& box, const std::function<void(const Append& append)>& write) {
  auto& tensor = std::get<DcpTensor>(metadata_.items.back().content);
  // A record's data are aligned from its beginning. Aligned in the file, too, they are copied faster.
  if (const std::int64_t rest = file_.size() % ZipWriter::kAlignment; rest != 0) {
    file_.append(std::string(static_cast<std::size_t>(ZipWriter::kAlignment - rest), '\0'));
  }
  const TensorRecord record(tensor.dtype, box.sizes);
  tensor.chunks.push_back({box, {name_, file_.size(), record.length()}});
  file_.append(record.head());
  std::uint32_t sum = 0;
  write([&](std::span<const char> data) { sum = combine_crc32(sum, file_.append(data), data.size()); });
  file_.append(record.tail(sum));
}

void DcpFile::add_value(const std::string& name, const DcpPath& path, const PythonValue& value) {
  const std::string record = object_record(value);
  metadata_.items.push_back({name, DcpObject{{name_, file_.size(), static_cast<std::int64_t>(record.size())}}});
  metadata_.paths.emplace_back(name, path);
  file_.append(record);
}

DcpMetadata DcpFile::take_metadata() { return std::exchange(metadata_, {}); }

void seal_dcp(const std::filesystem::path& folder, const std::string& metadata, std::vector<ListedFile> listed, FileSystem& files,
              std::int64_t saved) {
  SummedFile file(folder, std::string(kMetadataFile), files);
  file.append(metadata);
  listed.push_back(file.finish());
  seal_step(folder, listed, files, saved);
}

}  // namespace fsdp::ckpt
