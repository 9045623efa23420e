#include "checkpoint/safetensors.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kMostHeader = 100'000'000;
constexpr const char* kMetadata = "__metadata__";
// {"name": {"shape": [1]}}
constexpr int kDeepest = 3;

[[noreturn]] void fail(const std::string& file, const std::string& why) { throw Error(file + ": " + why); }

/// A value for a message.
std::string shown(const Json& value) {
  constexpr std::size_t kMost = 60;
  const std::string text = value.dump();
  return text.size() <= kMost ? text : text.substr(0, kMost) + "...";
}

/// Parses JSON whose keys differ and which is no deeper than `deepest`.
Json parse(std::string_view text, const std::string& file, int deepest) {
  std::vector<std::unordered_set<std::string>> keys;
  const auto check = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start) {
      if (depth >= deepest) fail(file, "the JSON is nested deeper than this format is");
      keys.resize(static_cast<std::size_t>(depth) + 1);
      keys.back().clear();
    } else if (event == Json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys[static_cast<std::size_t>(depth) - 1].insert(key).second) fail(file, "the key '" + key + "' is there twice");
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), check);
  } catch (const Json::exception& error) {
    fail(file, "not valid JSON: " + std::string(error.what()).substr(0, 200));
  }
}

const Json& member(const Json& object, const char* key, const std::string& file, const std::string& where) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  if (!object.is_object() || found == object.end()) fail(file, where + " has no '" + key + "'");
  return *found;
}

std::int64_t natural(const Json& value, const std::string& file, const std::string& what) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > INT64_MAX) fail(file, what + " is no natural number: " + shown(value));
  return value.get<std::int64_t>();
}

/// numel * itemsize.
std::int64_t bytes_of(const SafetensorsTensor& tensor) {
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(numel(tensor.shape), itemsize(tensor.dtype), &bytes)) {
    throw Error("tensor '" + tensor.name + "' has more than 2^63 - 1 bytes");
  }
  return bytes;
}

/// `data` is where the data begin in the file, `size` how many bytes they have.
SafetensorsTensor read_tensor(const std::string& name, const Json& value, std::int64_t data, std::int64_t size, const std::string& file) {
  const std::string where = "tensor '" + name + "'";
  SafetensorsTensor tensor{.name = name, .dtype = {}, .shape = {}};
  const Json& dtype = member(value, "dtype", file, where);
  const std::optional<Dtype> known = dtype.is_string() ? dtype_of_safetensors(dtype.get_ref<const std::string&>()) : std::nullopt;
  if (!known) fail(file, where + " has the dtype " + shown(dtype) + ", which is not supported");
  tensor.dtype = *known;
  const Json& shape = member(value, "shape", file, where);
  if (!shape.is_array()) fail(file, where + " has no list as its shape");
  for (const Json& one : shape) tensor.shape.push_back(natural(one, file, where + ": a size"));
  const Json& range = member(value, "data_offsets", file, where);
  if (!range.is_array() || range.size() != 2) fail(file, where + " needs two data_offsets");
  const std::int64_t begin = natural(range[0], file, where + ": an offset");
  const std::int64_t end = natural(range[1], file, where + ": an offset");
  if (begin > end || end > size) {
    fail(file, where + " has bytes [" + std::to_string(begin) + ", " + std::to_string(end) + ") of " + std::to_string(size));
  }
  tensor.offset = data + begin;
  tensor.length = end - begin;
  try {
    if (bytes_of(tensor) != tensor.length) {
      throw Error(where + " has " + std::to_string(tensor.length) + " bytes, but its dtype and shape ask for " +
                  std::to_string(bytes_of(tensor)));
    }
  } catch (const Error& error) {
    fail(file, error.what());
  }
  return tensor;
}

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

SafetensorsFile read_file_of(const std::filesystem::path& path, FileSystem& files) {
  const File file = File::open(path, files);
  return {path.filename().string(), read_safetensors_header(file.reader(), file.size(), path.string()).tensors};
}

std::string header_text(const std::vector<SafetensorsTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  // Offsets count from the end of the header, whose length they are part of.
  std::int64_t offset = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", names_of(tensor.dtype).safetensors}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.length}}};
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
  if (length > kMostHeader || static_cast<std::int64_t>(length) > size - kLengthBytes) {
    fail(file, "not a safetensors file, or cut off: its header would have " + std::to_string(length) + " of the file's " +
                   std::to_string(size) + " bytes");
  }
  std::string text(length, '\0');
  read(kLengthBytes, text);
  if (!text.starts_with('{')) fail(file, "not a safetensors file: its header does not begin with '{'");
  const Json json = parse(text, file, kDeepest);
  if (!json.is_object()) fail(file, "the header is no object");

  SafetensorsHeader header;
  const std::int64_t data = kLengthBytes + static_cast<std::int64_t>(length);
  for (const auto& [name, value] : json.items()) {
    if (name != kMetadata) {
      header.tensors.push_back(read_tensor(name, value, data, size - data, file));
      continue;
    }
    if (!value.is_object()) fail(file, "__metadata__ is no object");
    for (const auto& [key, text_value] : value.items()) {
      if (!text_value.is_string()) fail(file, "__metadata__ '" + key + "' is no string");
      header.metadata[key] = text_value.get<std::string>();
    }
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    return std::pair(a.offset, a.length) < std::pair(b.offset, b.length);
  });
  std::int64_t end = data;
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.offset != end) {
      fail(file, "the data of tensor '" + tensor.name + "' begin at byte " + std::to_string(tensor.offset) + ", but should at " +
                     std::to_string(end) + ", where those before end");
    }
    end += tensor.length;
  }
  if (end != size) fail(file, "the file has " + std::to_string(size) + " bytes, but its tensors end at " + std::to_string(end));
  return header;
}

std::map<std::string, std::set<std::string>> read_safetensors_index(std::string_view text, const std::string& file) {
  const Json index = parse(text, file, kDeepest);
  const Json& weights = member(index, "weight_map", file, "the index");
  if (!weights.is_object()) fail(file, "weight_map is no object");
  std::map<std::string, std::set<std::string>> names;
  for (const auto& [name, value] : weights.items()) {
    if (!value.is_string() || !is_plain_name(value.get_ref<const std::string&>())) {
      fail(file, "'" + name + "' is in " + shown(value) + ", which is no file of this folder");
    }
    names[value.get<std::string>()].insert(name);
  }
  return names;
}

std::vector<SafetensorsFile> read_safetensors(const std::filesystem::path& path, FileSystem& files) {
  if (!std::filesystem::is_directory(path)) return {read_file_of(path, files)};
  const std::filesystem::path index = path / kSafetensorsIndex;
  if (!std::filesystem::exists(index)) return {read_file_of(path / kSafetensorsFile, files)};
  std::vector<SafetensorsFile> model;
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
