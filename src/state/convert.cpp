#include "state/convert.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/dcp_file.h"
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

/// The number of elements that are read and converted at once.
constexpr std::int64_t kConvertedAtOnce = std::int64_t{1} << 20;

/// Calls `write` with the converted data of a tensor, kConvertedAtOnce elements at a time.
void write_converted(Source& source, const Planned& tensor, const std::function<void(std::span<const char> data)>& write) {
  const auto type = scalar_type_of(tensor.dtype, tensor.name);
  const auto all = ckpt::numel(tensor.shape);
  for (std::int64_t begin = 0; begin < all; begin += kConvertedAtOnce) {
    const auto values = source.read(tensor.source_name, ckpt::whole(tensor.shape), begin, std::min(kConvertedAtOnce, all - begin)).to(type);
    write({static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
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
  ckpt::create_safetensors(folder, plan);
  ckpt::fill_safetensors(folder, plan, [&](const ckpt::SafetensorsTensor& tensor, ckpt::File& file) {
    auto at = tensor.offset;
    write_converted(source, *by_name.at(tensor.name), [&](std::span<const char> data) {
      file.write_at(at, data);
      at += static_cast<std::int64_t>(data.size());
    });
  });
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
  std::optional<ckpt::DcpFile> file;
  const auto finish = [&] {
    if (!file) return;
    auto written = file->take_metadata();
    std::move(written.items.begin(), written.items.end(), std::back_inserter(metadata.items));
    std::move(written.paths.begin(), written.paths.end(), std::back_inserter(metadata.paths));
    listed.push_back(file->finish());
    file.reset();
  };
  for (const auto& tensor : tensors) {
    if (file && file->size() + tensor.bytes() > options.most_bytes_per_file) finish();
    if (!file) file.emplace(folder, "__0_" + std::to_string(listed.size()) + ".distcp");
    file->add_tensor(tensor.name, path_of(tensor.name, options.prefix), tensor.dtype, tensor.shape);
    file->add_box(ckpt::whole(tensor.shape), [&](const ckpt::DcpFile::Append& append) { write_converted(source, tensor, append); });
  }
  finish();
  ckpt::seal_dcp(folder, ckpt::write_dcp_metadata(metadata), std::move(listed));
}

}  // namespace

Converted convert(const std::string& from, const std::string& to, const ConvertOptions& options) {
  const at::NoGradGuard no_grad;
  if (options.most_bytes_per_file < 1) throw Error("the largest size of a file must be positive");
  const auto source = open_source(from);
  const bool from_dcp = source->format() == Source::Format::kDcp;
  // A source gives safetensors this prefix.
  const std::string source_prefix = from_dcp ? options.prefix : std::string(kModel) + ".";
  Converted result;
  std::vector<Planned> tensors;
  for (const auto& name : source->names()) {
    const auto found = source->find(name);
    if (const auto why = source->unreadable(name); !why.empty() && name.starts_with(source_prefix)) {
      result.unreadable.push_back("'" + name + "': " + why);
      continue;
    }
    if (!name.starts_with(source_prefix) || !found) {
      ++result.left_out;
      continue;
    }
    Planned tensor{.name = name.substr(source_prefix.size()), .source_name = name, .dtype = found->dtype, .shape = found->shape};
    if (!from_dcp) tensor.name.insert(0, options.prefix);
    if (tensor.name.empty()) throw Error(from + ": '" + name + "' without the prefix '" + options.prefix + "' has no name left");
    if (options.dtype && is_convertible(scalar_type_of(found->dtype, name))) tensor.dtype = dtype_of(*options.dtype, name);
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
