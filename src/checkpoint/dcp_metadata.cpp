#include "checkpoint/dcp_metadata.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/pickle.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kStorageVersion = "1.0.0";

// The classes, by their full names.
constexpr std::string_view kMetadataClass = "torch.distributed.checkpoint.metadata.Metadata";
constexpr std::string_view kTensor = "torch.distributed.checkpoint.metadata.TensorStorageMetadata";
constexpr std::string_view kProperties = "torch.distributed.checkpoint.metadata.TensorProperties";
constexpr std::string_view kChunk = "torch.distributed.checkpoint.metadata.ChunkStorageMetadata";
constexpr std::string_view kBytes = "torch.distributed.checkpoint.metadata.BytesStorageMetadata";
constexpr std::string_view kIndex = "torch.distributed.checkpoint.metadata.MetadataIndex";
constexpr std::string_view kStorageInfo = "torch.distributed.checkpoint.filesystem._StorageInfo";
constexpr std::string_view kSize = "torch.Size";
constexpr std::string_view kTorch = "torch.";

std::span<const std::string_view> allowed_globals() {
  // All names of torch are allowed, because an unknown dtype makes only its own tensor unreadable. The classes of paths occur in the path
  // of the folder that was first written, which is not used; Python 3.13 has moved these classes. Python 3.11.2 writes the memory format,
  // an enum, as an attribute of its class.
  static constexpr std::array<std::string_view, 17> kGlobals = {"torch.*",
                                                                kMetadataClass,
                                                                kTensor,
                                                                kProperties,
                                                                kChunk,
                                                                kBytes,
                                                                kIndex,
                                                                kStorageInfo,
                                                                "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
                                                                "torch.distributed.checkpoint.metadata.StorageMeta",
                                                                "torch.serialization._get_layout",
                                                                "builtins.getattr",
                                                                "collections.OrderedDict",
                                                                "pathlib.PosixPath",
                                                                "pathlib._local.PosixPath",
                                                                "pathlib.WindowsPath",
                                                                "pathlib._local.WindowsPath"};
  return kGlobals;
}

/// The state of an instance of a class.
const PickleValue& state_of(const PickleValue& value, std::string_view type) {
  if (!value.is_object_of(type) || value.state() == nullptr) value.throw_unexpected("an object of '" + std::string(type) + "'");
  return *value.state();
}

/// A torch.Size, or the tuple of numbers that Megatron-FSDP writes in its place.
Shape read_size(const PickleValue& value) {
  const bool is_tuple = value.is(PickleValue::Kind::tuple);
  if (!is_tuple && (!value.is_object_of(kSize) || value.arguments().items().size() != 1)) value.throw_unexpected("a torch.Size");
  Shape size;
  for (const PickleValue* item : (is_tuple ? value : *value.arguments().items()[0]).items()) {
    size.push_back(item->integer());
    if (size.back() < 0) item->throw_unexpected("a size of 0 or more");
  }
  return size;
}

/// Returns nothing for an unknown dtype; `name` then gets its name.
std::optional<Dtype> read_dtype(const PickleValue& properties, std::string_view& name) {
  const std::span<const PickleValue* const> fields = state_of(properties, kProperties).items();
  if (fields.size() < 5) properties.throw_unexpected("tensor properties of five fields or more");  // Torch 2.15 has added strides.
  const std::string_view global = fields[0]->global();
  if (!global.starts_with(kTorch)) fields[0]->throw_unexpected("a dtype");
  name = global;
  return dtype_of_name(global.substr(kTorch.size()));
}

std::variant<DcpTensor, DcpUnreadable> read_tensor(const PickleValue& value) {
  const PickleValue& state = state_of(value, kTensor);
  std::string_view name;
  const std::optional<Dtype> dtype = read_dtype(state.at("properties"), name);
  if (!dtype) return DcpUnreadable{"its dtype is " + std::string(name) + ", which this library does not know"};
  DcpTensor tensor{.dtype = *dtype, .shape = read_size(state.at("size")), .chunks = {}};
  for (const PickleValue* item : state.at("chunks").items()) {
    const PickleValue& chunk = state_of(*item, kChunk);
    tensor.chunks.push_back({.box = {read_size(chunk.at("offsets")), read_size(chunk.at("sizes"))}, .record = {}});
  }
  return tensor;
}

RecordLocation read_location(const PickleValue& value) {
  const PickleValue& state = state_of(value, kStorageInfo);
  const PickleValue& path = state.at("relative_path");
  RecordLocation location{std::string(path.string()), state.at("offset").integer(), state.at("length").integer()};
  // A checkpoint can't cause files outside of the folder to be opened.
  if (location.file.empty() || location.file == "." || location.file == ".." ||
      location.file.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
    path.throw_unexpected("the name of a file in the checkpoint's folder");
  }
  if (location.offset < 0) state.at("offset").throw_unexpected("an offset of 0 or more");
  if (location.length < 0) state.at("length").throw_unexpected("a length of 0 or more");
  const PickleValue* transforms = state.find("transform_descriptors");
  if (transforms != nullptr && !transforms->is(PickleValue::Kind::none) && !transforms->items().empty()) {
    transforms->throw_unexpected("no transformation of the data; save without extensions");
  }
  return location;
}

struct PlacedRecord {
  Shape offsets;
  RecordLocation location;
};

struct StorageRecords {
  std::unordered_map<std::string_view, std::vector<PlacedRecord>> of_tensors;
  std::unordered_map<std::string_view, RecordLocation> of_objects;
};

StorageRecords read_records(const PickleValue& storage_data) {
  StorageRecords records;
  const std::span<const PickleValue* const> entries = storage_data.entries();
  for (std::size_t i = 0; i < entries.size(); i += 2) {
    const PickleValue& index = state_of(*entries[i], kIndex);
    const std::string_view name = index.at("fqn").string();
    const PickleValue* offset = index.find("offset");
    RecordLocation location = read_location(*entries[i + 1]);
    if (offset == nullptr || offset->is(PickleValue::Kind::none)) {
      records.of_objects[name] = std::move(location);
    } else {
      records.of_tensors[name].push_back({read_size(*offset), std::move(location)});
    }
  }
  return records;
}

void place_chunks(const std::string& name, DcpTensor& tensor, std::vector<PlacedRecord> records, const std::string& file) {
  const auto throw_for = [&](const std::string& what) { throw Error(file + ": tensor '" + name + "': " + what); };
  try {
    numel(tensor.shape);
    for (const DcpTensor::Chunk& chunk : tensor.chunks) check_within(chunk.box, tensor.shape);
  } catch (const Error& error) {
    throw_for(error.what());
  }
  // Usually, boxes and records are in the same order.
  const auto fits = [](const DcpTensor::Chunk& chunk, const PlacedRecord& record) { return chunk.box.offsets == record.offsets; };
  if (std::equal(tensor.chunks.begin(), tensor.chunks.end(), records.begin(), records.end(), fits)) {
    for (std::size_t i = 0; i < records.size(); ++i) tensor.chunks[i].record = std::move(records[i].location);
    return;
  }
  // If several records have the same place, the last one counts, as in Python.
  const auto before = [](const PlacedRecord& a, const PlacedRecord& b) { return a.offsets < b.offsets; };
  std::stable_sort(records.begin(), records.end(), before);
  for (DcpTensor::Chunk& chunk : tensor.chunks) {
    const auto after = std::upper_bound(records.begin(), records.end(), PlacedRecord{chunk.box.offsets, {}}, before);
    if (after != records.begin() && fits(chunk, *std::prev(after))) {
      chunk.record = std::prev(after)->location;
    } else if (numel(chunk.box.sizes) != 0) {
      throw_for("no record is listed for one of its " + std::to_string(tensor.chunks.size()) + " boxes; the checkpoint is damaged");
    }
  }
}

DcpPath read_path(const PickleValue& value) {
  DcpPath path;
  for (const PickleValue* part : value.items()) {
    if (part->is(PickleValue::Kind::integer)) {
      path.emplace_back(part->integer());
    } else {
      path.emplace_back(std::string(part->string()));
    }
  }
  return path;
}

/// The methods write the objects that the functions above read, field by field in torch's order.
class MetadataWriter {
 public:
  std::string write(const DcpMetadata& metadata) {
    for (const DcpItem& item : metadata.items) {
      const auto* unreadable = std::get_if<DcpUnreadable>(&item.content);
      if (unreadable != nullptr) throw Error("'" + item.name + "' cannot be written: " + unreadable->why);
    }
    out_.instance(kModule, "Metadata");
    out_.begin_dict();
    out_.string("state_dict_metadata");
    out_.begin_dict();
    for (const DcpItem& item : metadata.items) {
      out_.string(item.name);
      if (const auto* tensor = std::get_if<DcpTensor>(&item.content)) {
        write_tensor(*tensor);
      } else {
        out_.instance(kModule, "BytesStorageMetadata");
      }
    }
    out_.end_dict();
    out_.string("planner_data");
    out_.begin_dict();
    for (const auto& [name, path] : metadata.paths) write_path(name, path);
    out_.end_dict();
    out_.string("storage_data");
    out_.begin_dict();
    for (const DcpItem& item : metadata.items) write_records(item);
    out_.end_dict();
    out_.string("storage_meta");
    write_storage_meta();
    out_.string("version");
    out_.string(kStorageVersion);
    out_.end_dict();
    out_.build();
    return out_.finish();
  }

 private:
  void write_size(const Shape& size) {
    out_.global("torch", "Size");
    out_.begin_tuple();
    out_.begin_tuple();
    for (const std::int64_t one : size) out_.integer(one);
    out_.end_tuple();
    out_.end_tuple();
    out_.reduce();
  }

  /// callable(argument), where the argument is written by `fn`.
  template <typename Fn>
  void write_call(std::string_view module, std::string_view name, Fn fn) {
    out_.global(module, name);
    out_.begin_tuple();
    fn();
    out_.end_tuple();
    out_.reduce();
  }

  void write_tensor(const DcpTensor& tensor) {
    out_.instance(kModule, "TensorStorageMetadata");
    out_.begin_dict();
    out_.string("properties");
    out_.instance(kModule, "TensorProperties");
    out_.begin_tuple();
    out_.global("torch", names_of(tensor.dtype).name);
    write_call("torch.serialization", "_get_layout", [this] { out_.string("torch.strided"); });
    out_.boolean(false);                                                       // requires_grad
    write_call(kModule, "_MEM_FORMAT_ENCODING", [this] { out_.integer(0); });  // contiguous
    out_.boolean(false);                                                       // pin_memory
    out_.end_tuple();
    out_.build();
    out_.string("size");
    write_size(tensor.shape);
    out_.string("chunks");
    out_.begin_list();
    for (const DcpTensor::Chunk& chunk : tensor.chunks) {
      out_.instance(kModule, "ChunkStorageMetadata");
      out_.begin_dict();
      out_.string("offsets");
      write_size(chunk.box.offsets);
      out_.string("sizes");
      write_size(chunk.box.sizes);
      out_.end_dict();
      out_.build();
    }
    out_.end_list();
    out_.end_dict();
    out_.build();
  }

  void write_path(const std::string& name, const DcpPath& path) {
    out_.string(name);
    out_.begin_tuple();
    for (const auto& part : path) {
      if (const auto* index = std::get_if<std::int64_t>(&part)) {
        out_.integer(*index);
      } else {
        out_.string(std::get<std::string>(part));
      }
    }
    out_.end_tuple();
  }

  void write_records(const DcpItem& item) {
    if (const auto* object = std::get_if<DcpObject>(&item.content)) return write_record(item.name, nullptr, 0, object->record);
    const auto& tensor = std::get<DcpTensor>(item.content);
    for (std::size_t i = 0; i < tensor.chunks.size(); ++i) {
      const DcpTensor::Chunk& chunk = tensor.chunks[i];
      if (chunk.record.file.empty()) continue;
      write_record(item.name, &chunk.box.offsets, static_cast<std::int64_t>(i), chunk.record);
    }
  }

  void write_record(const std::string& name, const Shape* offsets, std::int64_t index, const RecordLocation& record) {
    out_.instance(kModule, "MetadataIndex");
    out_.begin_dict();
    out_.string("fqn");
    out_.string(name);
    out_.string("index");
    if (offsets == nullptr) {
      out_.none();
    } else {
      out_.integer(index);
      out_.string("offset");
      write_size(*offsets);
    }
    out_.end_dict();
    out_.build();
    out_.instance("torch.distributed.checkpoint.filesystem", "_StorageInfo");
    out_.begin_dict();
    out_.string("relative_path");
    out_.string(record.file);
    out_.string("offset");
    out_.integer(record.offset);
    out_.string("length");
    out_.integer(record.length);
    out_.end_dict();
    out_.build();
  }

  // torch stores the folder's path here. Ours gets its final name only after it is written.
  void write_storage_meta() {
    out_.instance(kModule, "StorageMeta");
    out_.begin_dict();
    for (const char* field : {"checkpoint_id", "save_id", "load_id"}) {
      out_.string(field);
      out_.none();
    }
    out_.string("modules");
    out_.begin_list();
    out_.end_list();
    out_.end_dict();
    out_.build();
  }

  PickleWriter out_;
};

}  // namespace

DcpMetadata read_dcp_metadata(std::string_view data, const std::string& file) {
  const Pickle pickle(data, file, allowed_globals());
  const PickleValue& state = state_of(pickle.root(), kMetadataClass);
  StorageRecords records = read_records(state.at("storage_data"));

  DcpMetadata metadata;
  std::unordered_set<std::string_view> seen;
  const std::span<const PickleValue* const> entries = state.at("state_dict_metadata").entries();
  for (std::size_t i = 0; i < entries.size(); i += 2) {
    const std::string_view name = entries[i]->string();
    if (!seen.insert(name).second) entries[i]->throw_unexpected("each name once");
    DcpItem item{.name = std::string(name), .content = DcpObject{}};
    if (entries[i + 1]->is_object_of(kBytes)) {
      const auto record = records.of_objects.find(name);
      if (record == records.of_objects.end())
        throw Error(file + ": no record is listed for '" + item.name + "'; the checkpoint is damaged");
      item.content = DcpObject{record->second};
    } else {
      auto content = read_tensor(*entries[i + 1]);
      if (auto* tensor = std::get_if<DcpTensor>(&content)) {
        place_chunks(item.name, *tensor, std::move(records.of_tensors[name]), file);
        item.content = std::move(*tensor);
      } else {
        item.content = std::get<DcpUnreadable>(std::move(content));
      }
    }
    metadata.items.push_back(std::move(item));
  }

  const PickleValue* paths = state.find("planner_data");
  if (paths != nullptr && !paths->is(PickleValue::Kind::none)) {
    const std::span<const PickleValue* const> mappings = paths->entries();
    for (std::size_t i = 0; i < mappings.size(); i += 2) {
      metadata.paths.emplace_back(mappings[i]->string(), read_path(*mappings[i + 1]));
    }
  }
  return metadata;
}

std::string write_dcp_metadata(const DcpMetadata& metadata) { return MetadataWriter().write(metadata); }

}  // namespace fsdp::ckpt
