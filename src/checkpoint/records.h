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

/// The bytes around a tensor's data in its record, which is what torch.save writes for a contiguous CPU tensor: a zip archive. Only the
/// dtype and the sizes are needed, so the places of all records of a file are known before any of them is written, and the data go into
/// the file from where they are:
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
  /// `data_crc32` is that of the data (checksum.h). The tail's length does not depend on it.
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

/// A whole record: what torch.save writes for a plain Python value.
std::string object_record(const PythonValue& value);

/// A tensor's data in a file.
struct TensorData {
  /// All that torch.save wrote of the tensor's storage.
  struct Stored {
    std::int64_t offset = 0;
    std::int64_t length = 0;
    std::optional<std::uint32_t> crc32 = {};  ///< Nothing where it was written without.
  };
  Dtype dtype = Dtype::float32;
  Shape sizes;
  std::int64_t offset = 0;    ///< Of the first element's first byte in the file.
  std::int64_t length = 0;    ///< In bytes, up to the last element's end.
  Shape strides = {};         ///< In elements; empty where these follow row-major.
  bool is_conjugate = false;  ///< The tensor is the conjugate of what is stored.
  bool is_negative = false;   ///< The tensor is what is stored, times -1.
  Stored stored = {};

  /// The bytes are the tensor's, row-major.
  bool is_plain() const { return strides.empty() && !is_conjugate && !is_negative; }
};

/// Finds the data of a tensor's record, in two small reads. `file` reads the record's file, `name` is the tensor's, for errors. Throws
/// Error for a record of anything else, and one that torch.save would not write.
TensorData locate_tensor(const ReadAt& file, const RecordLocation& record, const std::string& name);

/// The same for a tensor of which dtype and sizes are known: others are an Error.
TensorData locate_tensor(const ReadAt& file, const RecordLocation& record, const std::string& name, Dtype dtype, const Shape& sizes);

/// What is wrong with a record whose stored bytes have another checksum than they should.
std::string fault_in_record(const File& file, const TensorData& data, const std::string& name);

/// Reads all of a record, and says of which type its value is if that is no plain one: "datetime.datetime". Empty for what read_object()
/// reads. Throws Error if something is damaged.
std::string type_of_object(const ReadAt& file, const RecordLocation& record, const std::string& name);

/// Reads a record that is no tensor. Throws Error for what is no plain value: what it would take to make it is not run.
PythonValue read_object(const ReadAt& file, const RecordLocation& record, const std::string& name);

}  // namespace fsdp::ckpt
