#include "checkpoint/records.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/pickle.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

static_assert(std::endian::native == std::endian::little, "data are written as they lie in memory, and the records say little-endian");

// Entries of a record; torch.save writes them in this order.
constexpr std::string_view kPickle = "data.pkl";
constexpr std::string_view kFormatVersion = ".format_version";
constexpr std::string_view kStorageAlignment = ".storage_alignment";
constexpr std::string_view kByteOrder = "byteorder";
constexpr std::string_view kData = "data/0";
constexpr std::string_view kVersionEntry = "version";

constexpr std::string_view kRebuildTensor = "torch._utils._rebuild_tensor_v2";
constexpr std::string_view kRebuildTensorOfDtype = "torch._utils._rebuild_tensor_v3";
constexpr std::string_view kUntypedStorage = "torch.storage.UntypedStorage";
constexpr std::string_view kTorchModule = "torch.";

/// Bytes of a tensor's pickle; all but its sizes are a few hundred.
constexpr std::int64_t kMostTensorPickle = 1 << 20;

Shape contiguous_strides(const Shape& sizes) {
  Shape strides(sizes.size(), 1);
  for (std::size_t d = sizes.size(); d-- > 1;) {
    // May overflow for a tensor without elements, where strides mean nothing.
    if (__builtin_mul_overflow(strides[d], std::max<std::int64_t>(sizes[d], 1), &strides[d - 1])) strides[d - 1] = 1;
  }
  return strides;
}

void write_tuple(PickleWriter& out, const Shape& values) {
  out.begin_tuple();
  for (const std::int64_t value : values) out.integer(value);
  out.end_tuple();
}

/// The call that rebuilds the tensor from its storage. Dtypes without a class of storage are an argument of a newer function.
std::string tensor_pickle(Dtype dtype, const Shape& sizes) {
  const DtypeNames& names = names_of(dtype);
  const bool has_storage = !names.storage.empty();
  const std::int64_t count = numel(sizes);
  PickleWriter out;
  out.global("torch._utils", has_storage ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  out.begin_tuple();
  out.begin_tuple();
  out.string("storage");
  if (has_storage) {
    out.global("torch", names.storage);
  } else {
    out.global("torch.storage", "UntypedStorage");
  }
  out.string("0");
  out.string("cpu");
  out.integer(has_storage ? count : count * names.itemsize);
  out.end_tuple();
  out.persistent_id();
  out.integer(0);  // offset in the storage
  write_tuple(out, sizes);
  write_tuple(out, contiguous_strides(sizes));
  out.boolean(false);  // requires_grad
  out.global("collections", "OrderedDict");
  out.begin_tuple();
  out.end_tuple();
  out.reduce();  // no hooks
  if (!has_storage) out.global("torch", names.name);
  out.end_tuple();
  out.reduce();
  return out.finish();
}

void add_front(ZipWriter& zip, std::string_view pickle) {
  zip.add(kPickle, pickle);
  zip.add(kFormatVersion, "1");
  zip.add(kStorageAlignment, std::to_string(ZipWriter::kAlignment));
  zip.add(kByteOrder, "little");
}

void add_back(ZipWriter& zip) {
  zip.add(kVersionEntry, "3\n");
  zip.finish();
}

std::span<const std::string_view> tensor_globals() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const DtypeNames& dtype : dtypes()) {
      all.push_back(std::string(kTorchModule) + std::string(dtype.name));
      if (!dtype.storage.empty()) all.push_back(std::string(kTorchModule) + std::string(dtype.storage));
    }
    return all;
  }();
  static const std::vector<std::string_view> globals = [] {
    std::vector<std::string_view> all(names.begin(), names.end());
    all.insert(all.end(), {kRebuildTensor, kRebuildTensorOfDtype, kUntypedStorage, "collections.OrderedDict"});
    return all;
  }();
  return globals;
}

/// Reads the first and the last bytes of a record once. In most records, they contain everything except the data.
ReadAt with_ends_cached(const ReadAt& file, const RecordLocation& record) {
  constexpr std::int64_t kCached = 1024;
  const std::int64_t length = std::min(kCached, record.length);
  const std::int64_t last = record.length - length;
  std::string head(static_cast<std::size_t>(length), '\0');
  file(record.offset, head);
  std::string tail(head.size(), '\0');
  file(record.offset + last, tail);
  return [&file, begin = record.offset, head = std::move(head), tail = std::move(tail), last, length](std::int64_t offset,
                                                                                                      std::span<char> to) {
    const auto count = static_cast<std::int64_t>(to.size());
    if (offset + count <= length) {
      std::memcpy(to.data(), head.data() + offset, to.size());
    } else if (offset >= last) {
      std::memcpy(to.data(), tail.data() + (offset - last), to.size());
    } else {
      file(begin + offset, to);
    }
  };
}

ZipReader open_record(const ReadAt& file, const RecordLocation& record, const std::string& name) {
  if (record.offset < 0 || record.length < 0 || record.offset > std::numeric_limits<std::int64_t>::max() - record.length) {
    throw Error(record.file + ": no place in a file for the record of '" + name + "'");
  }
  ZipReader zip(with_ends_cached(file, record), record.length,
                record.file + ", record of '" + name + "' at byte " + std::to_string(record.offset));
  const ZipReader::Entry* order = zip.find(kByteOrder);
  if (order != nullptr && (order->size != 6 || zip.data(*order) != "little")) zip.fail("its data are not little-endian");
  return zip;
}

Shape read_shape(const PickleValue& value) {
  Shape shape;
  for (const PickleValue* item : value.items()) shape.push_back(item->integer());
  return shape;
}

/// Reads the lazy operations of a tensor, which are in a dict after the fixed arguments, if there is one.
void read_lazy_operations(std::span<const PickleValue* const> arguments, std::size_t index, TensorData& data) {
  if (arguments.size() <= index || arguments[index]->is(PickleValue::Kind::none)) return;
  const std::span<const PickleValue* const> entries = arguments[index]->entries();
  for (std::size_t i = 0; i < entries.size(); i += 2) {
    const std::string_view key = entries[i]->string();
    if (key != "conj" && key != "neg") entries[i]->throw_unexpected("'conj' or 'neg'");
    (key == "conj" ? data.is_conjugate : data.is_negative) = entries[i + 1]->boolean();
  }
}

/// Returns over how many elements of the storage the tensor's `count` ones reach.
std::int64_t read_strides(const PickleValue& value, std::int64_t count, TensorData& data) {
  Shape strides = read_shape(value);
  const Shape row_major = contiguous_strides(data.sizes);
  if (strides.size() != row_major.size())
    value.throw_unexpected("a stride for each of " + std::to_string(row_major.size()) + " dimensions");
  if (count == 0) return 0;
  bool is_row_major = true;
  std::int64_t reach = 1;
  for (std::size_t d = 0; d < strides.size(); ++d) {
    if (data.sizes[d] == 1) continue;
    is_row_major = is_row_major && strides[d] == row_major[d];
    std::int64_t further = 0;
    if (strides[d] < 0 || __builtin_mul_overflow(data.sizes[d] - 1, strides[d], &further) ||
        __builtin_add_overflow(reach, further, &reach)) {
      value.throw_unexpected("strides within a storage");
    }
  }
  if (!is_row_major) data.strides = std::move(strides);
  return reach;
}

}  // namespace

ZipWriter TensorRecord::zip_up_to_data() const {
  ZipWriter zip;
  add_front(zip, tensor_pickle(dtype_, sizes_));
  zip.begin(kData, data_length_);
  return zip;
}

TensorRecord::TensorRecord(Dtype dtype, const Shape& sizes) : dtype_(dtype), sizes_(sizes), data_length_(0), length_(0) {
  if (__builtin_mul_overflow(numel(sizes), itemsize(dtype), &data_length_)) throw Error("a tensor has more than 2^63 - 1 bytes");
  ZipWriter zip = zip_up_to_data();
  head_ = zip.take();
  zip.end(0);
  add_back(zip);
  length_ = zip.position();
}

std::string TensorRecord::tail(std::uint32_t data_crc32) const {
  ZipWriter zip = zip_up_to_data();
  zip.take();
  zip.end(data_crc32);
  add_back(zip);
  return zip.take();
}

std::string object_record(const PythonValue& value) {
  PickleWriter out;
  write(out, value);
  ZipWriter zip;
  add_front(zip, out.finish());
  add_back(zip);
  return zip.take();
}

TensorData locate_tensor(const ReadAt& file, const RecordLocation& record, const std::string& name) {
  const ZipReader zip = open_record(file, record, name);
  const ZipReader::Entry& description = zip.at(kPickle);
  if (description.size > kMostTensorPickle) zip.fail("not a tensor: its pickle has " + std::to_string(description.size) + " bytes");
  const std::string text = zip.data(description);
  const Pickle pickle(text, record.file + ", record of '" + name + "'", tensor_globals());
  const PickleValue& root = pickle.root();
  const bool has_dtype = root.is_object_of(kRebuildTensorOfDtype);
  if (!has_dtype && !root.is_object_of(kRebuildTensor)) root.throw_unexpected("a tensor");

  // _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata]) and v3(..., hooks, dtype).
  const std::span<const PickleValue* const> arguments = root.arguments().items();
  if (arguments.size() < (has_dtype ? 7U : 6U)) root.throw_unexpected("a tensor's six or seven arguments");
  // ("storage", class, key, device, number of elements)
  const PickleValue& id = arguments[0]->persistent_id();
  if (id.items().size() != 5 || id.items()[0]->string() != "storage") id.throw_unexpected("a storage's five fields");
  const PickleValue& type = *id.items()[1];
  TensorData data;
  const PickleValue& dtype = has_dtype ? *arguments[6] : type;
  const std::string_view global = dtype.global();
  const std::string_view short_name = global.starts_with(kTorchModule) ? global.substr(kTorchModule.size()) : std::string_view();
  const std::optional<Dtype> found = has_dtype ? dtype_of_name(short_name) : dtype_of_storage(short_name);
  if (!found || (has_dtype && type.global() != kUntypedStorage)) dtype.throw_unexpected("a dtype or its storage");
  data.dtype = *found;
  data.sizes = read_shape(*arguments[2]);

  std::int64_t count = 0;
  try {
    count = numel(data.sizes);
  } catch (const Error& error) {
    zip.fail(error.what());
  }
  read_lazy_operations(arguments, has_dtype ? 7 : 6, data);
  const std::int64_t reach = read_strides(*arguments[3], count, data);

  const ZipReader::Entry& entry = zip.at("data/" + std::string(id.items()[2]->string()));
  const std::int64_t size = itemsize(data.dtype);
  const std::int64_t storage_numel = id.items()[4]->integer();
  const std::int64_t storage_offset = arguments[1]->integer();
  const std::int64_t expected_size = has_dtype ? 1 : size;
  if (storage_numel < 0 || storage_numel != entry.size / expected_size || entry.size % expected_size != 0) {
    zip.fail("its data have " + std::to_string(entry.size) + " bytes, which is not what the tensor's storage should have");
  }
  if (storage_offset < 0 || storage_offset > entry.size / size || std::max(count, reach) > entry.size / size - storage_offset) {
    zip.fail("the tensor of " + std::to_string(count) + " elements does not lie in its storage of " + std::to_string(entry.size) +
             " bytes");
  }
  data.stored = {record.offset + zip.data_offset(entry), entry.size, entry.crc32};
  data.offset = data.stored.offset + storage_offset * size;
  data.length = reach * size;
  return data;
}

TensorData locate_tensor(const ReadAt& file, const RecordLocation& record, const std::string& name, Dtype dtype, const Shape& sizes) {
  TensorData data = locate_tensor(file, record, name);
  if (data.dtype != dtype || data.sizes != sizes) {
    throw Error(record.file + ", record of '" + name + "' at byte " + std::to_string(record.offset) + ": it is a tensor of " +
                std::string(names_of(data.dtype).name) + " with " + std::to_string(numel(data.sizes)) +
                " elements, but the checkpoint's metadata says " + std::string(names_of(dtype).name) + " with " +
                std::to_string(numel(sizes)) + " or other sizes; the checkpoint is damaged");
  }
  return data;
}

std::string fault_in_record(const File& file, const TensorData& data, const std::string& name) {
  return "the checkpoint " + file.path().parent_path().string() + " is damaged; load an older one: the record of '" + name + "' in " +
         file.path().filename().string() + " has another checksum than its bytes " + std::to_string(data.stored.offset) + " to " +
         std::to_string(data.stored.offset + data.stored.length - 1) + ": they changed";
}

std::string type_of_object(const ReadAt& file, const RecordLocation& record, const std::string& name) {
  static constexpr std::array<std::string_view, 1> kAll = {"*"};
  const ZipReader zip = open_record(file, record, name);
  // Values that hold tensors have entries for their data.
  for (const ZipReader::Entry& entry : zip.entries()) zip.data(entry);
  const std::string text = zip.data(zip.at(kPickle));
  const Pickle pickle(text, record.file + ", record of '" + name + "'", kAll);
  for (const std::string_view global : pickle.globals()) {
    if (std::find(kPlainGlobals.begin(), kPlainGlobals.end(), global) == kPlainGlobals.end()) return std::string(global);
  }
  try {
    python_value(pickle.root(), text.size());
  } catch (const Error&) {
    return pickle.root().description();
  }
  return "";
}

PythonValue read_object(const ReadAt& file, const RecordLocation& record, const std::string& name) {
  const ZipReader zip = open_record(file, record, name);
  const std::string text = zip.data(zip.at(kPickle));
  const Pickle pickle(text, record.file + ", record of '" + name + "'", kPlainGlobals);
  return python_value(pickle.root(), text.size());
}

}  // namespace fsdp::ckpt
