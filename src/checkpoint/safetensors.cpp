#include "checkpoint/safetensors.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>

#include "checkpoint/json_events.h"
#include "checkpoint/printable.h"
#include "checkpoint/safetensors_parts.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kMostHeader = 100'000'000;
constexpr std::string_view kMetadata = "__metadata__";
// {"name": {"shape": [1]}}
constexpr std::size_t kHeaderDepth = 3;

[[noreturn]] void fail(const std::string& file, const std::string& why) { throw Error(file + ": " + why); }

/// A value for a message.
std::string text_of(const Json& value) { return shown(value.dump()); }

/// numel * itemsize.
std::int64_t bytes_of(const SafetensorsTensor& tensor) {
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(numel(tensor.shape), itemsize(tensor.dtype), &bytes)) {
    throw Error("tensor '" + shown(tensor.name) + "' has more than 2^63 - 1 bytes");
  }
  return bytes;
}

/// True for the dtype with two elements in a byte. torch counts its bytes in the last dimension, safetensors its elements.
bool is_packed(Dtype dtype) { return dtype == Dtype::float4_e2m1fn_x2; }

class HeaderEvents final : public JsonEvents {
 public:
  /// `data` is where the data begin in the file, `size` how many bytes they have.
  HeaderEvents(const std::string& file, std::int64_t data, std::int64_t size) : JsonEvents(file, kHeaderDepth), data_(data), size_(size) {}

  SafetensorsHeader header;

 private:
  /// The entry of a tensor in a header.
  struct Described {
    std::optional<std::string> dtype;
    std::optional<Shape> shape;
    std::optional<std::vector<std::int64_t>> offsets;
  };

  bool in_metadata() const { return key_in(1) == kMetadata; }
  std::string where() const { return "tensor '" + shown(key_in(1)) + "'"; }

  void on_begin(bool is_object) override {
    if (depth() == 2) {
      if (!is_object) not_an_object();
      described_ = {};
    }
    if (depth() != 3) return;
    if (in_metadata()) no_string();
    const auto& field = key_in(2);
    if (field == "dtype") no_dtype(is_object ? "an object" : "a list");
    if (field == "shape") is_object ? no_shape() : void(described_.shape.emplace());
    if (field == "data_offsets") is_object ? no_offsets() : void(described_.offsets.emplace());
  }

  void on_value(Json value) override {
    if (depth() == 1) {
      if (!in_metadata() || !value.is_null()) not_an_object();
    } else if (in_metadata()) {
      if (!value.is_string()) no_string();
      header.metadata[key_in(2)] = std::move(value.get_ref<std::string&>());
    } else if (depth() == 2) {
      const auto& field = key_in(2);
      if (field == "shape") no_shape();
      if (field == "data_offsets") no_offsets();
      if (field != "dtype") return;
      if (!value.is_string()) no_dtype(text_of(value));
      described_.dtype = std::move(value.get_ref<std::string&>());
    } else if (key_in(2) == "shape") {
      described_.shape->push_back(natural(value, "a size"));
    } else if (key_in(2) == "data_offsets") {
      if (described_.offsets->size() == 2) no_offsets();
      described_.offsets->push_back(natural(value, "an offset"));
    }
  }

  void on_end() override {
    if (depth() == 2 && !in_metadata()) header.tensors.push_back(tensor());
  }

  /// Returns the tensor whose description has ended.
  SafetensorsTensor tensor() {
    if (!described_.dtype) not_an_object();
    if (!described_.shape) fail(where() + " has no 'shape'");
    if (!described_.offsets) fail(where() + " has no 'data_offsets'");
    if (described_.offsets->size() != 2) no_offsets();
    const auto begin = described_.offsets->front();
    const auto end = described_.offsets->back();
    if (begin > end || end > size_) {
      fail(where() + " has bytes [" + std::to_string(begin) + ", " + std::to_string(end) + ") of " + std::to_string(size_));
    }
    SafetensorsTensor tensor{
        .name = key_in(1), .dtype = {}, .shape = *std::move(described_.shape), .offset = data_ + begin, .length = end - begin};
    if (const auto dtype = dtype_of_safetensors(*described_.dtype)) {
      take_dtype(tensor, *dtype);
    } else {
      tensor.unreadable = "its dtype " + shown(*described_.dtype) + " is not supported";
    }
    return tensor;
  }

  void take_dtype(SafetensorsTensor& tensor, Dtype dtype) const {
    tensor.dtype = dtype;
    std::int64_t bytes = 0;
    try {
      if (is_packed(dtype)) {
        const auto elements = numel(tensor.shape);
        if (tensor.shape.empty() || tensor.shape.back() % 2 != 0) {
          tensor.unreadable = "its last dimension does not divide by two, as many as a byte has of " + *described_.dtype;
          bytes = elements % 2 == 0 ? elements / 2 : -1;
        } else {
          tensor.shape.back() /= 2;
        }
      }
      if (tensor.unreadable.empty()) bytes = bytes_of(tensor);
    } catch (const Error& error) {
      fail(error.what());
    }
    if (bytes < 0) fail(where() + " has no whole number of bytes");
    if (bytes != tensor.length) {
      fail(where() + " has " + std::to_string(tensor.length) + " bytes, but its dtype and shape ask for " + std::to_string(bytes));
    }
  }

  std::int64_t natural(const Json& value, const std::string& what) const {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > INT64_MAX) {
      fail(where() + ": " + what + " is no natural number: " + text_of(value));
    }
    return value.get<std::int64_t>();
  }

  [[noreturn]] void not_an_object() const { fail(in_metadata() ? "__metadata__ is no object" : where() + " has no 'dtype'"); }
  [[noreturn]] void no_string() const { fail("__metadata__ '" + shown(key_in(2)) + "' is no string"); }
  [[noreturn]] void no_dtype(const std::string& found) const { fail(where() + " has no name as its dtype, but " + found); }
  [[noreturn]] void no_shape() const { fail(where() + " has no list as its shape"); }
  [[noreturn]] void no_offsets() const { fail(where() + " needs two data_offsets"); }

  std::int64_t data_;
  std::int64_t size_;
  Described described_;  // the tensor whose description has begun
};

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

class IndexEvents final : public JsonEvents {
 public:
  explicit IndexEvents(const std::string& file) : JsonEvents(file, kHeaderDepth) {}

  bool has_weights = false;
  std::map<std::string, std::set<std::string>> names;  // by file

 private:
  bool in_weights() const { return depth() > 0 && key_in(1) == "weight_map"; }

  void on_begin(bool is_object) override {
    if (!in_weights()) return;
    if (depth() == 3) no_file(is_object ? "an object" : "a list");
    if (!is_object) no_weights();
    has_weights = true;
  }
  void on_value(Json value) override {
    if (!in_weights()) return;
    if (depth() == 1) no_weights();
    if (!value.is_string() || !is_plain_name(value.get_ref<const std::string&>())) no_file(text_of(value));
    names[std::move(value.get_ref<std::string&>())].insert(key_in(2));
  }
  void on_end() override {}

  [[noreturn]] void no_weights() const { fail("weight_map is no object"); }
  [[noreturn]] void no_file(const std::string& found) const {
    fail("'" + shown(key_in(2)) + "' is in " + found + ", which is no file of this folder");
  }
};

/// The files that DCP's ranks wrote, one for each rank, sorted by name.
std::vector<std::string> files_of_ranks(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kSafetensorsShard) && name.ends_with(".safetensors")) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

SafetensorsFile read_file_of(const std::filesystem::path& path, FileSystem& files) {
  const File file = File::open(path, files);
  SafetensorsHeader header = read_safetensors_header(file.reader(), file.size(), path.string());
  place_boxes(header, path.string());
  return {path.filename().string(), std::move(header.tensors)};
}

std::string header_text(const std::vector<SafetensorsTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header[std::string(kMetadata)] = metadata;
  // Offsets count from the end of the header, whose length they are part of.
  std::int64_t offset = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    if (!is_utf8(tensor.name)) {
      throw Error("the name '" + printable_bytes(tensor.name) + "' is not UTF-8, as names in safetensors are; rename it");
    }
    Shape shape = tensor.shape;
    if (is_packed(tensor.dtype)) shape.back() *= 2;
    header[tensor.name] = {
        {"dtype", names_of(tensor.dtype).safetensors}, {"shape", shape}, {"data_offsets", {offset, offset + tensor.length}}};
    offset += tensor.length;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception& error) {
    throw Error(std::string("a tensor's name or the metadata cannot be written as JSON: ") + error.what());
  }
  text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
  if (text.size() > kMostHeader) throw Error("the names of these tensors take more than 100 MB; divide them among more files");
  std::uint64_t length = text.size();
  std::string head(sizeof(length), '\0');
  std::memcpy(head.data(), &length, sizeof(length));
  return head + text;
}

PlannedSafetensors plan_file(std::vector<SafetensorsTensor> tensors, const SafetensorsOptions& options) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const SafetensorsTensor& a, const SafetensorsTensor& b) { return itemsize(a.dtype) > itemsize(b.dtype); });
  PlannedSafetensors planned;
  planned.head = header_text(tensors, options.metadata);
  planned.size = static_cast<std::int64_t>(planned.head.size());
  for (SafetensorsTensor& tensor : tensors) {
    tensor.offset = planned.size;
    planned.size += tensor.length;
  }
  planned.file.tensors = std::move(tensors);
  return planned;
}

/// HF's name of file `number` (from 1) of `count`.
std::string file_name(std::size_t number, std::size_t count) {
  if (count == 1) return std::string(kSafetensorsFile);
  char text[64];
  std::snprintf(text, sizeof(text), "model-%05zu-of-%05zu.safetensors", number, count);
  return text;
}

}  // namespace

SafetensorsHeader read_safetensors_header(const ReadAt& read, std::int64_t size, const std::string& file) {
  if (size < kLengthBytes) fail(file, "not a safetensors file: it has " + std::to_string(size) + " bytes");
  std::uint64_t length = 0;
  std::string bytes(sizeof(length), '\0');
  read(0, bytes);
  std::memcpy(&length, bytes.data(), sizeof(length));
  // torch.save writes a zip archive; before torch 1.6, it wrote a pickle.
  if (bytes.starts_with("PK\x03\x04") || bytes.starts_with("\x80\x02\x8a")) {
    fail(file,
         "this is a file of torch.save, not a checkpoint. In Python, read it by torch.load, and give it to the model by "
         "set_model_state_dict; or write it by safetensors.torch.save_file, whose files load() reads");
  }
  if (length > kMostHeader || static_cast<std::int64_t>(length) > size - kLengthBytes) {
    fail(file, "not a safetensors file, or cut off: its header would have " + std::to_string(length) + " of the file's " +
                   std::to_string(size) + " bytes");
  }
  std::string text(length, '\0');
  read(kLengthBytes, text);
  if (!text.starts_with('{')) fail(file, "not a safetensors file: its header does not begin with '{'");
  const std::int64_t data = kLengthBytes + static_cast<std::int64_t>(length);
  HeaderEvents events(file, data, size - data);
  events.parse(text);
  SafetensorsHeader header = std::move(events.header);
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    return std::pair(a.offset, a.length) < std::pair(b.offset, b.length);
  });
  std::int64_t end = data;
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.offset != end) {
      fail(file, "the data of tensor '" + shown(tensor.name) + "' begin at byte " + std::to_string(tensor.offset) + ", but should at " +
                     std::to_string(end) + ", where those before end");
    }
    end += tensor.length;
  }
  if (end != size) fail(file, "the file has " + std::to_string(size) + " bytes, but its tensors end at " + std::to_string(end));
  return header;
}

std::map<std::string, std::set<std::string>> read_safetensors_index(std::string_view text, const std::string& file) {
  IndexEvents events(file);
  events.parse(text);
  if (!events.has_weights) fail(file, "the index has no 'weight_map'");
  return std::move(events.names);
}

bool is_safetensors(const std::filesystem::path& path) {
  return !std::filesystem::is_directory(path) || std::filesystem::exists(path / kSafetensorsFile) ||
         std::filesystem::exists(path / kSafetensorsIndex) || !files_of_ranks(path).empty();
}

std::vector<SafetensorsFile> read_safetensors(const std::filesystem::path& path, FileSystem& files) {
  if (!std::filesystem::is_directory(path)) return {read_file_of(path, files)};
  const std::filesystem::path index = path / kSafetensorsIndex;
  // As in transformers, an index beside model.safetensors is ignored, because it belongs to a model that was there before.
  if (std::filesystem::exists(path / kSafetensorsFile)) return {read_file_of(path / kSafetensorsFile, files)};
  std::vector<SafetensorsFile> model;
  if (!std::filesystem::exists(index)) {
    for (const std::string& name : files_of_ranks(path)) model.push_back(read_file_of(path / name, files));
    return model;
  }
  std::string missing;
  for (auto& [name, expected] : read_safetensors_index(read_whole(index, kMostHeader, files), index.string())) {
    if (!std::filesystem::exists(path / name)) {
      model.push_back({.name = name, .tensors = {}, .not_there = {expected.begin(), expected.end()}});
      continue;
    }
    SafetensorsFile& file = model.emplace_back(read_file_of(path / name, files));
    std::erase_if(file.tensors, [&names = expected](const SafetensorsTensor& tensor) { return names.erase(tensor.name) == 0; });
    for (const std::string& tensor : expected) missing.append("\n  '").append(tensor).append("' is not in ").append(name);
  }
  if (!missing.empty()) fail(index.string(), "the index names what the files have not:" + missing);
  return model;
}

SafetensorsPlan plan_safetensors(const std::vector<SafetensorsTensor>& tensors, const SafetensorsOptions& options) {
  std::unordered_set<std::string_view> names;
  std::vector<std::vector<SafetensorsTensor>> groups(1);
  std::int64_t total = 0;
  std::int64_t in_group = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    if (tensor.name == kMetadata || !names.insert(tensor.name).second) {
      throw Error("'" + tensor.name + "' cannot be the name of " + (tensor.name == kMetadata ? "a tensor" : "two tensors"));
    }
    if (names_of(tensor.dtype).safetensors.empty()) {
      throw Error("tensor '" + tensor.name + "' is of " + std::string(names_of(tensor.dtype).name) + ", which safetensors do not know");
    }
    if (is_packed(tensor.dtype) && (tensor.shape.empty() || tensor.shape.back() > INT64_MAX / 2)) {
      throw Error("tensor '" + tensor.name + "' of " + std::string(names_of(tensor.dtype).name) +
                  " has no last dimension to be written in");
    }
    SafetensorsTensor sized = tensor;
    sized.length = bytes_of(tensor);
    if (__builtin_add_overflow(total, sized.length, &total)) throw Error("these tensors have more than 2^63 - 1 bytes");
    if (!groups.back().empty() && in_group + sized.length > options.most_bytes_per_file) {
      groups.emplace_back();
      in_group = 0;
    }
    in_group += sized.length;
    groups.back().push_back(std::move(sized));
  }

  SafetensorsPlan plan;
  Json weights = Json::object();
  for (std::vector<SafetensorsTensor>& group : groups) {
    PlannedSafetensors& planned = plan.files.emplace_back(plan_file(std::move(group), options));
    planned.file.name = file_name(plan.files.size(), groups.size());
    for (const SafetensorsTensor& tensor : planned.file.tensors) weights[tensor.name] = planned.file.name;
  }
  if (groups.size() > 1) {
    const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weights)}};
    plan.index = index.dump(2) + "\n";
  }
  return plan;
}

void create_safetensors(const std::filesystem::path& folder, const SafetensorsPlan& plan, FileSystem& files) {
  for (const PlannedSafetensors& planned : plan.files) {
    File file = File::create(folder / planned.file.name, files);
    file.write_at(0, planned.head);
    file.close();
  }
  if (!plan.index.empty()) write_whole(folder / kSafetensorsIndex, plan.index, files);
}

void fill_safetensors(const std::filesystem::path& folder, const SafetensorsPlan& plan,
                      const std::function<void(const SafetensorsTensor& tensor, File& file)>& write, FileSystem& files) {
  for (const PlannedSafetensors& planned : plan.files) {
    File file = File::open_to_write(folder / planned.file.name, files);
    for (const SafetensorsTensor& tensor : planned.file.tensors) write(tensor, file);
    file.sync();
    file.close();
  }
}

}  // namespace fsdp::ckpt
