#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/boxes.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/dtype.h"
#include "checkpoint/files.h"
#include "checkpoint/python_value.h"
#include "checkpoint/zip.h"

namespace fsdp::ckpt {

/// The bytes before and after a tensor's data in its record. A record is what torch.save writes for a contiguous CPU tensor: a zip archive.
/// These bytes depend on the dtype and the sizes only, so the places of all records of a file are known before any of them is written, and
/// the data can be written from where they are in memory:
///
///     file.write_at(at, record.head());
///     file.write_at(at + record.data_offset(), data);  // or in parts, in any order
///     file.write_at(at + record.data_offset() + record.data_length(), record.tail(crc32(0, data)));
class TensorRecord {
 public:
  TensorRecord(Dtype dtype, const Shape& sizes);

  const std::string& head() const { return head_; }
  std::int64_t data_offset() const { return static_cast<std::int64_t>(head_.size()); }
  std::int64_t data_length() const { return data_length_; }
  /// The bytes after the data. `data_crc32` is the checksum of the data (checksum.h). The length of the tail does not depend on it.
  std::string tail(std::uint32_t data_crc32) const;
  /// Bytes of the whole record.
  std::int64_t length() const { return length_; }

 private:
  ZipWriter zip_up_to_data() const;

  Dtype dtype_;
  Shape sizes_;
  std::int64_t data_length_;
  std::string head_;
  std::int64_t length_;
};

/// Returns a whole record: the bytes that torch.save writes for a plain Python value.
std::string object_record(const PythonValue& value);

/// Where the data of a tensor lie in a file, and how to read them.
struct TensorData {
  /// The whole storage of the tensor, as torch.save wrote it.
  struct Stored {
    std::int64_t offset = 0;
    std::int64_t length = 0;
    std::optional<std::uint32_t> crc32 = {};  ///< Its checksum; nothing if it was written without one.
  };
  Dtype dtype = Dtype::float32;
  Shape sizes;
  std::int64_t offset = 0;    ///< The position in the file of the first byte of the first element.
  std::int64_t length = 0;    ///< The number of bytes up to the end of the last element.
  Shape strides = {};         ///< The strides in elements; empty if the elements lie in row-major order.
  bool is_conjugate = false;  ///< The tensor is the conjugate of what is stored.
  bool is_negative = false;   ///< The tensor is what is stored, times -1.
  Stored stored = {};

  /// True if the bytes are the tensor's values in row-major order.
  bool is_plain() const { return strides.empty() && !is_conjugate && !is_negative; }
};

/// Finds the data of a tensor's record, in two small reads. `file` reads the record's file, `name` is the tensor's, for errors. Throws
/// Error for a record of anything else, and one that torch.save would not write.
TensorData locate_tensor(const ReadAt& file, const RecordLocation& record, const std::string& name);

/// Does so for a tensor whose dtype and sizes are known. Throws Error also if the record has others.
TensorData locate_tensor(const ReadAt& file, const RecordLocation& record, const std::string& name, Dtype dtype, const Shape& sizes);

/// Describes a record whose stored bytes do not have the checksum that they should have.
std::string fault_in_record(const File& file, const TensorData& data, const std::string& name);

/// Reads a whole record, and returns the type of its value if that is not a plain one, such as "datetime.datetime". Empty for values that
/// read_object() reads. Throws Error if something is damaged.
std::string type_of_object(const ReadAt& file, const RecordLocation& record, const std::string& name);

/// Reads a record that is not a tensor. Throws Error if it is not a plain value; the code that would build such a value is never run.
PythonValue read_object(const ReadAt& file, const RecordLocation& record, const std::string& name);

}  // namespace fsdp::ckpt
