#include "state/convert.h"

#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "checkpoint/checksum.h"
#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/records.h"
#include "checkpoint/safetensors.h"
#include "fsdp/error.h"
#include "state/scalar_type.h"
#include "state/snapshot.h"
#include "state/source.h"

namespace fsdp::state {
namespace {

namespace fs = std::filesystem;

/// A tensor to be written under `name`.
struct Planned {
  std::string name;
  std::string source_name;
  ckpt::Dtype dtype = ckpt::Dtype::float32;
  ckpt::Shape shape;

  std::int64_t bytes() const { return ckpt::numel(shape) * ckpt::itemsize(dtype); }
};

/// Elements that are read and converted at once.
constexpr std::int64_t kConvertedAtOnce = std::int64_t{1} << 20;

/// Calls `write(offset in bytes, bytes)` for a tensor's data as they will be, block by block.
template <typename Write>
void for_each_block(Source& source, const Planned& tensor, Write write) {
  const auto type = scalar_type_of(tensor.dtype, tensor.name);
  const auto all = ckpt::numel(tensor.shape);
  for (std::int64_t begin = 0; begin < all; begin += kConvertedAtOnce) {
    const auto values = source.read(tensor.source_name, ckpt::whole(tensor.shape), begin, std::min(kConvertedAtOnce, all - begin)).to(type);
    write(begin * ckpt::itemsize(tensor.dtype), std::span(static_cast<const char*>(values.const_data_ptr()), values.nbytes()));
  }
}

void write_safetensors(Source& source, const std::vector<Planned>& tensors, const fs::path& folder, const ConvertOptions& options) {
  std::vector<ckpt::SafetensorsTensor> wanted;
  for (const auto& tensor : tensors) {
    wanted.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .offset = 0, .length = 0});
  }
  const auto plan = ckpt::plan_safetensors(wanted, {.most_bytes_per_file = options.most_bytes_per_file});
  std::map<std::string, const Planned*> by_name;
  for (const auto& tensor : tensors) by_name.emplace(tensor.name, &tensor);
  for (const auto& planned : plan.files) {
    auto file = ckpt::File::create(folder / planned.file.name);
    file.write_at(0, planned.head);
    for (const auto& tensor : planned.file.tensors) {
      for_each_block(source, *by_name.at(tensor.name),
                     [&](std::int64_t offset, std::span<const char> data) { file.write_at(tensor.offset + offset, data); });
    }
    file.sync();
    file.close();
  }
  if (!plan.index.empty()) ckpt::write_whole(folder / ckpt::kSafetensorsIndex, plan.index);
  ckpt::sync_folder(folder);
}

/// "model.layers.0.weight" is layers.0.weight of the dict "model".
ckpt::DcpPath path_of(const std::string& name, const std::string& prefix) {
  if (prefix.size() < 2 || !prefix.ends_with('.')) return {name};
  return {prefix.substr(0, prefix.size() - 1), name.substr(prefix.size())};
}

void write_dcp(Source& source, const std::vector<Planned>& tensors, const fs::path& folder, const ConvertOptions& options) {
  ckpt::DcpMetadata metadata;
  std::vector<ckpt::ListedFile> listed;
  std::unique_ptr<ckpt::SummedFile> file;
  std::string file_name;
  for (const auto& tensor : tensors) {
    if (file != nullptr && file->size() + tensor.bytes() > options.most_bytes_per_file) {
      listed.push_back(file->finish());
      file.reset();
    }
    if (file == nullptr) {
      file_name = "__0_" + std::to_string(listed.size()) + ".distcp";
      file = std::make_unique<ckpt::SummedFile>(folder, file_name);
    }
    const ckpt::TensorRecord record(tensor.dtype, tensor.shape);
    ckpt::DcpTensor stored{.dtype = tensor.dtype, .shape = tensor.shape, .chunks = {}};
    stored.chunks.push_back({ckpt::whole(tensor.shape), {file_name, file->size(), record.length()}});
    metadata.items.push_back({tensor.name, std::move(stored)});
    metadata.paths.emplace_back(tensor.name, path_of(tensor.name, options.prefix));
    file->append(record.head());
    std::uint32_t crc = 0;
    for_each_block(source, tensor,
                   [&](std::int64_t, std::span<const char> data) { crc = ckpt::combine_crc32(crc, file->append(data), data.size()); });
    file->append(record.tail(crc));
  }
  if (file != nullptr) listed.push_back(file->finish());
  ckpt::SummedFile metadata_file(folder, std::string(ckpt::kMetadataFile));
  metadata_file.append(ckpt::write_dcp_metadata(metadata));
  listed.push_back(metadata_file.finish());
  ckpt::seal_step(folder, listed);
}

}  // namespace

Converted convert(const std::string& from, const std::string& to, const ConvertOptions& options) {
  const torch::NoGradGuard no_grad;
  if (options.most_bytes_per_file < 1) throw Error("the largest size of a file must be positive");
  const auto source = open_source(from);
  const bool from_dcp = source->format() == Source::Format::kDcp;
  // A source gives safetensors this prefix.
  const std::string source_prefix = from_dcp ? options.prefix : std::string(kModel) + ".";
  Converted result;
  std::vector<Planned> tensors;
  for (const auto& name : source->names()) {
    const auto found = source->find(name);
    if (!name.starts_with(source_prefix) || !found) {
      ++result.left_out;
      continue;
    }
    Planned tensor{.name = name.substr(source_prefix.size()), .source_name = name, .dtype = found->dtype, .shape = found->shape};
    if (!from_dcp) tensor.name.insert(0, options.prefix);
    if (tensor.name.empty()) throw Error(from + ": '" + name + "' without the prefix '" + options.prefix + "' has no name left");
    if (options.dtype && at::isFloatingType(scalar_type_of(found->dtype, name))) tensor.dtype = dtype_of(*options.dtype, name);
    ++result.tensors;
    result.bytes += tensor.bytes();
    tensors.push_back(std::move(tensor));
  }
  if (tensors.empty()) {
    throw Error(from + " has no tensor whose name begins with '" + options.prefix + "'; give the prefix that its names have");
  }
  auto step = ckpt::begin_new(to);
  const auto& folder = step.path();
  try {
    from_dcp ? write_safetensors(*source, tensors, folder, options) : write_dcp(*source, tensors, folder, options);
    ckpt::commit_new(folder, to);
  } catch (...) {
    step.discard();
    throw;
  }
  return result;
}

}  // namespace fsdp::state
