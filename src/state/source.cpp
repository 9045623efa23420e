#include "state/source.h"

#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>
#include <variant>

#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/records.h"
#include "checkpoint/safetensors.h"
#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "state/scalar_type.h"
#include "state/snapshot.h"

namespace fsdp::state {
namespace {

namespace fs = std::filesystem;

using ckpt::DcpTensor;

/// Files of a folder, opened when they are first needed.
class OpenFiles {
 public:
  explicit OpenFiles(fs::path folder) : folder_(std::move(folder)) {}

  ckpt::File& operator[](const std::string& name) {
    auto found = files_.find(name);
    if (found == files_.end()) found = files_.emplace(name, ckpt::File::open(folder_ / name)).first;
    return found->second;
  }

 private:
  fs::path folder_;
  std::map<std::string, ckpt::File> files_;
};

/// How the elements of a stored box get to elements [offset, offset + numel) of another one.
std::vector<ckpt::Run> runs_to(const ckpt::Box& stored, const ckpt::Box& box, std::int64_t offset, std::int64_t numel) {
  std::vector<ckpt::Run> runs;
  for (auto run : ckpt::runs_to_box(stored, box)) {
    const auto begin = std::max(run.destination, offset);
    const auto end = std::min(run.destination + run.length, offset + numel);
    if (begin < end) runs.push_back({run.source + begin - run.destination, begin - offset, end - begin});
  }
  return runs;
}

/// Mapped apart from malloc's heap where it is large: it goes soon.
at::Tensor host_values(const std::string& name, ckpt::Dtype dtype, std::int64_t numel) {
  return memory::zeros(at::kCPU, numel * ckpt::itemsize(dtype)).view(scalar_type_of(dtype, name));
}

class Dcp final : public Source {
 public:
  explicit Dcp(const std::string& path) : path_(path), folder_(path), files_(folder_) {
    const auto file = folder_ / ckpt::kMetadataFile;
    metadata_ = ckpt::read_dcp_metadata(ckpt::read_whole(file, ckpt::kMostMetadata), file.string());
    for (const auto& item : metadata_.items) {
      by_name_.emplace(item.name, &item);
      names_.push_back(item.name);
    }
  }

  Format format() const override { return Format::kDcp; }
  const std::string& path() const override { return path_; }
  const std::vector<std::string>& names() const override { return names_; }
  bool has(const std::string& name) const override { return by_name_.contains(name); }

  std::optional<Tensor> find(const std::string& name) const override {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return std::nullopt;
    const auto* tensor = std::get_if<DcpTensor>(&found->second->content);
    return tensor == nullptr ? std::nullopt : std::optional(Tensor{tensor->dtype, tensor->shape});
  }

  at::Tensor read(const std::string& name, const ckpt::Box& box, std::int64_t offset, std::int64_t numel) override {
    const auto& tensor = std::get<DcpTensor>(by_name_.at(name)->content);
    auto values = host_values(name, tensor.dtype, numel);
    auto* to = static_cast<char*>(values.mutable_data_ptr());
    const auto itemsize = ckpt::itemsize(tensor.dtype);
    std::int64_t found = 0;
    for (const auto& chunk : tensor.chunks) {
      const auto runs = runs_to(chunk.box, box, offset, numel);
      if (runs.empty()) continue;
      auto& file = files_[chunk.record.file];
      const auto data = ckpt::locate_tensor(file.reader(), chunk.record, name, tensor.dtype, chunk.box.sizes);
      for (const auto& run : runs) {
        file.read_at(data.offset + run.source * itemsize,
                     {to + run.destination * itemsize, static_cast<std::size_t>(run.length * itemsize)});
        found += run.length;
      }
    }
    if (found != numel) {
      throw Error(path_ + ": the stored parts of '" + name + "' have " + std::to_string(found) + " of the " + std::to_string(numel) +
                  " elements that are needed");
    }
    return values;
  }

  ckpt::PythonValue read_object(const std::string& name) override {
    const auto* object = std::get_if<ckpt::DcpObject>(&by_name_.at(name)->content);
    if (object == nullptr) throw Error(path_ + ": '" + name + "' is a tensor, not a plain value");
    return ckpt::read_object(files_[object->record.file].reader(), object->record, name);
  }

  void verify(const Ranks& ranks) const override {
    if (!fs::exists(folder_ / ckpt::kSidecar)) return;  // Python's
    const auto listed = ckpt::read_sidecar(folder_);
    std::string faults;
    for (std::size_t i = 0; i < listed.size(); ++i) {
      if (static_cast<std::int64_t>(i) % ranks.size() != ranks.index()) continue;
      const auto fault = ckpt::fault_in(folder_, listed[i]);
      if (!fault.empty()) faults += "\n    " + fault;
    }
    if (!faults.empty()) throw Error("the checkpoint " + path_ + " is damaged; load an older one:" + faults);
  }

 private:
  std::string path_;
  fs::path folder_;
  OpenFiles files_;
  ckpt::DcpMetadata metadata_;
  std::map<std::string, const ckpt::DcpItem*> by_name_;
  std::vector<std::string> names_;
};

class Safetensors final : public Source {
 public:
  explicit Safetensors(const std::string& path)
      : path_(path),
        files_(fs::is_directory(path) ? fs::path(path) : fs::path(path).parent_path()),
        headers_(ckpt::read_safetensors(path)) {
    for (const auto& file : headers_) {
      for (const auto& tensor : file.tensors) {
        names_.push_back(std::string(kModel) + "." + tensor.name);
        by_name_.emplace(names_.back(), std::pair(&file.name, &tensor));
      }
    }
  }

  Format format() const override { return Format::kSafetensors; }
  const std::string& path() const override { return path_; }
  const std::vector<std::string>& names() const override { return names_; }
  bool has(const std::string& name) const override { return by_name_.contains(name); }

  std::optional<Tensor> find(const std::string& name) const override {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return std::nullopt;
    return Tensor{found->second.second->dtype, found->second.second->shape};
  }

  at::Tensor read(const std::string& name, const ckpt::Box& box, std::int64_t offset, std::int64_t numel) override {
    const auto& [file, tensor] = by_name_.at(name);
    const auto itemsize = ckpt::itemsize(tensor->dtype);
    auto values = host_values(name, tensor->dtype, numel);
    auto* to = static_cast<char*>(values.mutable_data_ptr());
    for (const auto& run : runs_to(ckpt::whole(tensor->shape), box, offset, numel)) {
      files_[*file].read_at(tensor->offset + run.source * itemsize,
                            {to + run.destination * itemsize, static_cast<std::size_t>(run.length * itemsize)});
    }
    return values;
  }

  ckpt::PythonValue read_object(const std::string& name) override {
    throw Error(path_ + ": safetensors files hold tensors only, not '" + name + "'");
  }
  void verify(const Ranks&) const override {}

 private:
  std::string path_;
  OpenFiles files_;
  std::vector<ckpt::SafetensorsFile> headers_;
  std::vector<std::string> names_;
  std::map<std::string, std::pair<const std::string*, const ckpt::SafetensorsTensor*>> by_name_;
};

}  // namespace

at::Tensor Source::read_whole(const std::string& name) {
  const auto tensor = find(name);
  return read(name, ckpt::whole(tensor->shape), 0, ckpt::numel(tensor->shape)).view(tensor->shape);
}

std::unique_ptr<Source> open_source(const std::string& path) {
  const fs::path folder = path;
  if (!fs::exists(folder)) throw Error("there is no checkpoint " + path);
  const bool is_safetensors =
      !fs::is_directory(folder) || fs::exists(folder / ckpt::kSafetensorsIndex) || fs::exists(folder / ckpt::kSafetensorsFile);
  if (is_safetensors) return std::make_unique<Safetensors>(path);
  return std::make_unique<Dcp>(path);
}

}  // namespace fsdp::state
