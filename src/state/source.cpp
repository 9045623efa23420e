#include "state/source.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <tuple>
#include <utility>
#include <variant>

#include "checkpoint/checksum.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/places.h"
#include "checkpoint/records.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_parts.h"
#include "fsdp/error.h"
#include "memory/device_memory.h"
#include "state/scalar_type.h"
#include "state/snapshot.h"

namespace fsdp::state {
namespace {

namespace fs = std::filesystem;

using ckpt::DcpTensor;

/// Bumps the tensor's version, as copy_() does, because a graph that has saved the tensor must not be used any more.
void note_write(const at::Tensor& tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

/// Returns memory for values. Large blocks are mapped apart from malloc's heap, because they are freed soon.
at::Tensor host_values(const std::string& name, ckpt::Dtype dtype, std::int64_t numel) {
  return memory::zeros(at::kCPU, numel * ckpt::itemsize(dtype)).view(scalar_type_of(dtype, name));
}

/// A buffer for values that are converted, or copied to a device. It collects as many as fit, because many small copies would take long.
class Staging {
 public:
  /// For `numel` values that are stored as `dtype` and belong into `to`.
  Staging(const at::Tensor& to, std::int64_t numel, at::ScalarType dtype)
      : to_(to), values_(memory::host_zeros(to.device(), std::min(kElements, numel) * itemsize_of(dtype)).view(dtype)) {}
  /// Returns memory for the elements of `to` from `begin` on: for `numel` elements, or for as many as there is room for.
  std::span<char> next(std::int64_t begin, std::int64_t numel) {
    if (begin != begin_ + filled_ || filled_ == values_.numel()) {
      flush();
      begin_ = begin;
    }
    const auto count = std::min(numel, values_.numel() - filled_);
    const auto itemsize = itemsize_of(values_.scalar_type());
    auto* place = static_cast<char*>(values_.mutable_data_ptr()) + filled_ * itemsize;
    filled_ += count;
    return {place, static_cast<std::size_t>(count * itemsize)};
  }
  /// Copies the collected values to their place.
  void flush() {
    if (filled_ > 0) to_.narrow(0, begin_, filled_).copy_(values_.narrow(0, 0, filled_));
    filled_ = 0;
  }

 private:
  static constexpr std::int64_t kElements = std::int64_t{1} << 20;
  static std::int64_t itemsize_of(at::ScalarType dtype) { return static_cast<std::int64_t>(c10::elementSize(dtype)); }

  at::Tensor to_;
  at::Tensor values_;
  std::int64_t begin_ = 0;   // the position in to_ of the first collected value
  std::int64_t filled_ = 0;  // the number of collected values
};

class Dcp final : public Source {
 public:
  Dcp(const std::string& path, ckpt::PathOf path_of) : path_(path), files_(std::move(path_of)) {
    const std::string file(ckpt::kMetadataFile);
    metadata_ = ckpt::read_dcp_metadata(files_.read_whole(file, ckpt::kMostMetadata), (fs::path(path) / file).string());
    for (const auto& item : metadata_.items) {
      by_name_.emplace(item.name, &item);
      names_.push_back(item.name);
    }
    for (const auto& [name, where] : metadata_.paths) paths_.emplace(name, &where);
  }

  Format format() const override { return Format::kDcp; }
  const std::string& path() const override { return path_; }
  std::int64_t saved() const override { return files_.saved(); }
  const std::vector<std::string>& names() const override { return names_; }
  bool has(const std::string& name) const override { return by_name_.contains(name); }

  std::optional<Tensor> find(const std::string& name) const override {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return std::nullopt;
    const auto* tensor = std::get_if<DcpTensor>(&found->second->content);
    return tensor == nullptr ? std::nullopt : std::optional(Tensor{tensor->dtype, tensor->shape});
  }

  std::string unreadable(const std::string& name) const override {
    const auto found = by_name_.find(name);
    const auto* why = found == by_name_.end() ? nullptr : std::get_if<ckpt::DcpUnreadable>(&found->second->content);
    return why == nullptr ? "" : why->why;
  }

  std::vector<StoredBox> boxes(const std::string& name) const override {
    std::vector<StoredBox> parts;
    for (const auto& chunk : std::get<DcpTensor>(by_name_.at(name)->content).chunks) parts.push_back({chunk.box, chunk.record});
    return parts;
  }

  ckpt::TensorData locate(const std::string& name, const StoredBox& part) override {
    const auto dtype = std::get<DcpTensor>(by_name_.at(name)->content).dtype;
    return ckpt::locate_tensor(file(part.place.file).reader(), part.place, name, dtype, part.box.sizes);
  }

  ckpt::CheckedFile& file(const std::string& name) override { return files_[name]; }

  ckpt::DcpPath path_of(const std::string& name) const override {
    const auto found = paths_.find(name);
    return found == paths_.end() ? ckpt::DcpPath{name} : *found->second;
  }

  ckpt::PythonValue read_object(const std::string& name) override {
    if (const auto why = unreadable(name); !why.empty()) throw Error(path_ + ": '" + name + "' cannot be read: " + why);
    const auto* object = std::get_if<ckpt::DcpObject>(&by_name_.at(name)->content);
    if (object == nullptr) throw Error(path_ + ": '" + name + "' is a tensor, not a plain value");
    return ckpt::read_object(files_[object->record.file].reader(), object->record, name);
  }

 private:
  std::string path_;
  ckpt::CheckedFiles files_;
  ckpt::DcpMetadata metadata_;
  std::map<std::string, const ckpt::DcpItem*> by_name_;
  std::map<std::string, const ckpt::DcpPath*> paths_;
  std::vector<std::string> names_;
};

class Safetensors final : public Source {
 public:
  explicit Safetensors(const std::string& path)
      : path_(path),
        files_(fs::is_directory(path) ? fs::path(path) : fs::path(path).parent_path()),
        model_(ckpt::read_safetensors(path)),
        tensors_(ckpt::join_boxes(model_)) {
    const auto prefix = std::string(kModel) + ".";
    for (const auto& tensor : tensors_) {
      names_.push_back(prefix + tensor.name);
      by_name_.emplace(names_.back(), &tensor);
    }
    for (const auto& file : model_) {
      for (const auto& name : file.not_there) {
        names_.push_back(prefix + name);
        not_there_.emplace(names_.back(), &file.name);
      }
    }
  }

  Format format() const override { return Format::kSafetensors; }
  const std::string& path() const override { return path_; }
  std::int64_t saved() const override { return files_.saved(); }
  const std::vector<std::string>& names() const override { return names_; }
  bool has(const std::string& name) const override { return by_name_.contains(name) || not_there_.contains(name); }

  std::optional<Tensor> find(const std::string& name) const override {
    const auto found = by_name_.find(name);
    if (const auto missed = not_there_.find(name); missed != not_there_.end()) {
      throw Error(path_ + ": '" + name + "' is in " + *missed->second + ", which is not there; download it, too");
    }
    if (found == by_name_.end() || !found->second->unreadable.empty()) return std::nullopt;
    return Tensor{found->second->tensor.dtype, found->second->tensor.shape};
  }

  std::string unreadable(const std::string& name) const override {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? "" : found->second->unreadable;
  }

  std::vector<StoredBox> boxes(const std::string& name) const override {
    std::vector<StoredBox> parts;
    for (const auto& chunk : by_name_.at(name)->tensor.chunks) parts.push_back({chunk.box, chunk.record});
    return parts;
  }

  ckpt::TensorData locate(const std::string& name, const StoredBox& part) override {
    return {.dtype = by_name_.at(name)->tensor.dtype,
            .sizes = part.box.sizes,
            .offset = part.place.offset,
            .length = part.place.length,
            .stored = {part.place.offset, part.place.length, std::nullopt}};
  }
  ckpt::CheckedFile& file(const std::string& name) override { return files_[name]; }

  ckpt::PythonValue read_object(const std::string& name) override {
    if (const auto why = unreadable(name); !why.empty()) throw Error(path_ + ": '" + name + "' cannot be read: " + why);
    throw Error(path_ + ": safetensors files hold tensors only, not '" + name + "'");
  }

 private:
  std::string path_;
  ckpt::CheckedFiles files_;
  std::vector<ckpt::SafetensorsFile> model_;
  std::vector<ckpt::JoinedTensor> tensors_;
  std::vector<std::string> names_;
  std::map<std::string, const ckpt::JoinedTensor*> by_name_;
  std::map<std::string, const std::string*> not_there_;  // tensors that are not there, with the files in which they should be
};

}  // namespace

at::Tensor Source::read(const std::string& name, const ckpt::Box& box, std::int64_t offset, std::int64_t numel) {
  auto values = host_values(name, find(name)->dtype, numel);
  Transfer transfer(*this);
  transfer.add(name, box, offset, values);
  transfer.read_at_once();
  return values;
}

at::Tensor Source::read_whole(const std::string& name) {
  const auto tensor = find(name);
  return read(name, ckpt::whole(tensor->shape), 0, ckpt::numel(tensor->shape)).view(tensor->shape);
}

StoredValue Source::read_value(const std::string& name) {
  if (find(name)) return read_whole(name).clone();
  return read_object(name);
}

std::optional<ckpt::PythonValue> Source::read_scalar(const std::string& name) {
  const auto tensor = find(name);
  if (tensor && ckpt::numel(tensor->shape) != 1) return std::nullopt;
  if (!tensor) {
    auto value = read_object(name);
    return number_of(value) || std::holds_alternative<bool>(value.value) ? std::optional(std::move(value)) : std::nullopt;
  }
  const auto item = read_whole(name).item();
  if (item.isBoolean()) return ckpt::PythonValue{item.toBool()};
  if (item.isIntegral(/*includeBool=*/false)) return ckpt::PythonValue{item.toLong()};
  return item.isFloatingPoint() ? std::optional(ckpt::PythonValue{item.toDouble()}) : std::nullopt;
}

std::optional<double> number_of(const ckpt::PythonValue& value) {
  if (const auto* whole = std::get_if<std::int64_t>(&value.value)) return static_cast<double>(*whole);
  if (const auto* real = std::get_if<double>(&value.value)) return *real;
  return std::nullopt;
}

std::unique_ptr<Source> open_source(const std::string& path) {
  const fs::path folder = path;
  ckpt::require_checkpoint(folder);
  if (ckpt::is_safetensors(folder)) return std::make_unique<Safetensors>(path);
  return open_source(path, [folder](const std::string& name) { return folder / name; });
}

std::unique_ptr<Source> open_source(const std::string& path, ckpt::PathOf path_of) {
  return std::make_unique<Dcp>(path, std::move(path_of));
}

void Transfer::add(const std::string& name, const ckpt::Box& box, std::int64_t offset, at::Tensor to) {
  std::vector<std::pair<std::int64_t, std::int64_t>> covered;  // [begin, end) of `to`
  const auto slice = ckpt::boxes_of_slice(box, offset, to.numel());
  bool side_by_side = true;
  for (auto& part : source_.boxes(name)) {
    auto runs = ckpt::runs_to_slice(part.box, slice);
    if (runs.empty()) continue;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      covered.emplace_back(runs[i].destination, runs[i].destination + runs[i].length);
      side_by_side = side_by_side && (i == 0 || runs[i].destination == runs[i - 1].destination + runs[i - 1].length);
    }
    wanted_boxes_.push_back({wanted_.size(), std::move(part), std::move(runs)});
  }
  std::sort(covered.begin(), covered.end());
  std::int64_t end = 0;
  bool overlap = false;
  bool leave_out = false;
  for (const auto& [begin, next] : covered) {
    overlap = overlap || begin < end;
    leave_out = leave_out || begin > end;
    end = std::max(end, next);
  }
  if (overlap || leave_out || end < to.numel()) {
    throw ckpt::DamageError(source_.path() + ": the stored parts of '" + name + "' " +
                            (overlap ? "overlap" : "leave out elements that are needed") + "; the checkpoint is damaged");
  }
  const auto dtype = source_.find(name)->dtype;
  const bool as_it_is = to.is_cpu() && to.scalar_type() == scalar_type_of(dtype, name);
  wanted_.push_back({name, dtype, std::move(to), as_it_is, side_by_side, {}, {}});
}

std::int64_t Transfer::bytes() const {
  std::int64_t bytes = 0;
  for (const auto& wanted : wanted_) bytes += static_cast<std::int64_t>(wanted.to.nbytes());
  return bytes;
}

std::vector<ckpt::RecordLocation> Transfer::needed() const {
  std::vector<ckpt::RecordLocation> places;
  for (const auto& box : wanted_boxes_) places.push_back(box.part.place);
  return places;
}

void Transfer::pass(bool assigns) {
  std::sort(wanted_boxes_.begin(), wanted_boxes_.end(), [](const WantedBox& a, const WantedBox& b) {
    return std::tie(a.part.place.file, a.part.place.offset) < std::tie(b.part.place.file, b.part.place.offset);
  });
  for (const auto& part : wanted_boxes_) pass(part, assigns);
}

void Transfer::pass(const WantedBox& part, bool assigns) {
  auto& wanted = wanted_[part.wanted];
  auto& file = source_.file(part.part.place.file);
  const auto data = source_.locate(wanted.name, part.part);
  const auto itemsize = ckpt::itemsize(wanted.dtype);
  // Sums bytes, and stores them unless `to` is null.
  const auto sum_of = [&](std::int64_t begin, std::int64_t end, char* to) {
    std::uint32_t sum = 0;
    for (auto at = begin; at < end;) {
      // Reads up to the end of a block. Reading parts of two blocks would keep both and sum them twice.
      const auto length = std::min(end - at, ckpt::kSummedBlock - at % ckpt::kSummedBlock);
      const auto size = static_cast<std::size_t>(length);
      const auto piece = to == nullptr ? file.check(at, length) : file.read(at, std::span(to + (at - begin), size));
      sum = ckpt::combine_crc32(sum, piece, size);
      at += length;
    }
    return sum;
  };
  const bool at_once = assigns && data.is_plain() && (wanted.as_it_is || wanted.side_by_side);
  std::optional<Staging> staging;
  if (at_once && !wanted.as_it_is) {
    const auto numel = part.runs.back().destination + part.runs.back().length - part.runs.front().destination;
    staging.emplace(wanted.to, numel, scalar_type_of(wanted.dtype, wanted.name));
  }
  // Sums elements, and brings them to their place.
  const auto sum_of_brought = [&](const ckpt::Run& run, std::int64_t begin) {
    if (!staging) {
      auto* to = static_cast<char*>(wanted.to.mutable_data_ptr());
      return sum_of(begin, begin + run.length * itemsize, to + run.destination * itemsize);
    }
    std::uint32_t sum = 0;
    for (std::int64_t done = 0; done < run.length;) {
      const auto place = staging->next(run.destination + done, run.length - done);
      const auto from = begin + done * itemsize;
      const auto size = static_cast<std::int64_t>(place.size());
      sum = ckpt::combine_crc32(sum, sum_of(from, from + size, place.data()), place.size());
      done += size / itemsize;
    }
    return sum;
  };
  // The bytes that are needed, and their sums.
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  if (data.is_plain()) {
    for (const auto& run : part.runs) {
      const auto begin = data.offset + run.source * itemsize;
      ranges.emplace_back(begin, begin + run.length * itemsize);
    }
  } else {
    ranges.emplace_back(data.offset, data.offset + data.length);
  }
  const auto stored_end = data.stored.offset + data.stored.length;
  const bool is_new = source_.whole_records_.emplace(part.part.place.file, data.stored.offset).second;
  const bool all_is_needed = ranges.size() == 1 && ranges[0] == std::pair(data.stored.offset, stored_end);
  // A record without checksums of blocks is read as a whole: once to check it, and whenever some of it is assigned in the same reading.
  const bool reads_all = !file.is_listed() && (is_new || at_once) && data.stored.crc32;
  std::vector<std::uint32_t> sums;
  std::uint32_t all = 0;
  auto reached = data.stored.offset;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const auto [begin, end] = ranges[i];
    if (reads_all) all = ckpt::combine_crc32(all, sum_of(reached, begin, nullptr), static_cast<std::uint64_t>(begin - reached));
    sums.push_back(at_once ? sum_of_brought(part.runs[i], begin) : sum_of(begin, end, nullptr));
    all = ckpt::combine_crc32(all, sums.back(), static_cast<std::uint64_t>(end - begin));
    reached = end;
  }
  if (data.stored.crc32 && (reads_all || all_is_needed)) {
    if (reads_all) all = ckpt::combine_crc32(all, sum_of(reached, stored_end, nullptr), static_cast<std::uint64_t>(stored_end - reached));
    if (all != *data.stored.crc32) throw ckpt::DamageError(ckpt::fault_in_record(file.file(), data, wanted.name));
  }
  if (staging) staging->flush();
  if (at_once) {
    note_write(wanted.to);
    return;
  }
  if (!data.is_plain()) {
    wanted.rearranged.push_back({&file, data, sums[0], part.runs});
    return;
  }
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    wanted.file_runs.push_back({&file, ranges[i].first, part.runs[i].destination, part.runs[i].length, sums[i]});
  }
}

void Transfer::read_at_once() {
  pass(true);
  read();
}

namespace {

void compare(const ckpt::CheckedFile& file, const std::string& name, std::uint32_t sum, std::uint32_t expected) {
  if (sum == expected) return;
  throw Error("the values of '" + name + "' in " + file.file().path().string() + " changed while they were loaded");
}

}  // namespace

void Transfer::read() {
  for (auto& wanted : wanted_) {
    std::sort(wanted.file_runs.begin(), wanted.file_runs.end(), [](const FileRun& a, const FileRun& b) { return a.to < b.to; });
    if (!wanted.file_runs.empty()) wanted.as_it_is ? read_directly(wanted) : read_and_convert(wanted);
    for (const auto& part : wanted.rearranged) read_rearranged(wanted, part);
  }
}

void Transfer::read_directly(const Wanted& wanted) {
  const auto itemsize = ckpt::itemsize(wanted.dtype);
  auto* to = static_cast<char*>(wanted.to.mutable_data_ptr());
  for (const auto& file_run : wanted.file_runs) {
    const std::span place(to + file_run.to * itemsize, static_cast<std::size_t>(file_run.numel * itemsize));
    compare(*file_run.file, wanted.name, file_run.file->read_again(file_run.byte, place, 0), file_run.crc32);
  }
  note_write(wanted.to);
}

void Transfer::read_and_convert(const Wanted& wanted) {
  const auto itemsize = ckpt::itemsize(wanted.dtype);
  Staging staging(wanted.to, wanted.to.numel(), scalar_type_of(wanted.dtype, wanted.name));
  for (const auto& file_run : wanted.file_runs) {
    std::uint32_t sum = 0;
    for (std::int64_t done = 0; done < file_run.numel;) {
      const auto place = staging.next(file_run.to + done, file_run.numel - done);
      sum = file_run.file->read_again(file_run.byte + done * itemsize, place, sum);
      done += static_cast<std::int64_t>(place.size()) / itemsize;
    }
    compare(*file_run.file, wanted.name, sum, file_run.crc32);
  }
  staging.flush();
}

void Transfer::read_rearranged(const Wanted& wanted, const Rearranged& part) {
  const auto bytes = memory::zeros(at::kCPU, part.data.length);
  const std::span place(static_cast<char*>(bytes.mutable_data_ptr()), static_cast<std::size_t>(part.data.length));
  compare(*part.file, wanted.name, part.file->read_again(part.data.offset, place, 0), part.crc32);
  auto values = bytes.view(scalar_type_of(wanted.dtype, wanted.name));
  if (!part.data.strides.empty()) values = values.as_strided(part.data.sizes, part.data.strides);
  if (part.data.is_conjugate) values = values.conj_physical();
  if (part.data.is_negative) values = values.neg();
  values = values.contiguous().view({-1});
  for (const auto& run : part.runs) {
    wanted.to.narrow(0, run.destination, run.length).copy_(values.narrow(0, run.source, run.length));
  }
}

}  // namespace fsdp::state
