#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files.h"

namespace fsdp::ckpt {

/// Writes a zip archive as torch.save does: nothing compressed, all data at multiples of 64 bytes from the archive's beginning, in a folder
/// "archive". What lies before and after an entry's data is known without them, so they can be written by others, elsewhere and later;
/// only their CRC-32 comes after them.
///
/// This and not caffe2::serialize's writer: that one wants each entry's data at once and in order, does not tell sizes in advance, and
/// spends as long on checksums as on writing. The tests compare with it through torch.load and torch.save.
class ZipWriter {
 public:
  static constexpr std::int64_t kAlignment = 64;

  /// A whole entry.
  void add(std::string_view name, std::string_view data);
  /// An entry of `size` bytes that follow what take() returns next.
  void begin(std::string_view name, std::int64_t size);
  void end(std::uint32_t crc32);
  /// The end of the archive.
  void finish();

  /// Bytes of the archive up to here, with those that others write.
  std::int64_t position() const { return position_; }
  /// What was added since the last call.
  std::string take();

 private:
  struct Entry {
    std::string name;
    std::int64_t header = 0;
    std::int64_t size = 0;
    std::uint32_t crc32 = 0;
  };

  void append(std::string_view bytes);

  std::string text_;
  std::int64_t position_ = 0;
  std::vector<Entry> entries_;
};

/// An archive's list of entries, read from its end.
class ZipReader {
 public:
  struct Entry {
    std::string name;  ///< Without the archive's folder.
    std::int64_t header = 0;
    std::int64_t size = 0;
    bool is_compressed = false;
    /// Of the data; nothing where torch was told to write without (torch.serialization.set_crc32_options).
    std::optional<std::uint32_t> crc32 = {};
  };

  /// The archive is the first `length` bytes that `read` gives. Errors begin with `what`. A list of more than 1 MiB is not read.
  ZipReader(ReadAt read, std::int64_t length, std::string what);

  /// Null if there is none.
  const Entry* find(std::string_view name) const;
  /// Throws Error if there is none.
  const Entry& at(std::string_view name) const;
  /// Where an entry's data begin. Throws Error if they are compressed, or do not lie in the archive.
  std::int64_t data_offset(const Entry& entry) const;
  /// Throws Error also if the data are not those that the checksum was computed of.
  std::string data(const Entry& entry) const;
  const std::vector<Entry>& entries() const { return entries_; }

  [[noreturn]] void fail(const std::string& why) const;

 private:
  std::string read(std::int64_t offset, std::int64_t length) const;

  ReadAt read_;
  std::string what_;
  std::int64_t directory_ = 0;  // where it begins, and all data end
  std::vector<Entry> entries_;
};

}  // namespace fsdp::ckpt
