#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files.h"

namespace fsdp::ckpt {

/// Writes a zip archive as torch.save does: nothing compressed, all data at multiples of 64 bytes from the archive's beginning, in a folder
/// "archive". The bytes before and after an entry's data do not depend on the data, except for the CRC-32 behind them. Other code can
/// therefore write the data, elsewhere and later.
///
/// It is used instead of caffe2::serialize's writer, which needs each entry's data at once and in order, does not provide sizes in advance,
/// and spends as long on checksums as on writing. The tests compare with it through torch.load and torch.save.
class ZipWriter {
 public:
  static constexpr std::int64_t kAlignment = 64;

  /// Adds an entry with its data.
  void add(std::string_view name, std::string_view data);
  /// Begins an entry whose data, of `size` bytes, the caller writes behind the bytes that take() returns next.
  void begin(std::string_view name, std::int64_t size);
  void end(std::uint32_t crc32);
  /// Adds the end of the archive.
  void finish();

  /// The bytes of the archive so far, including the data that the caller writes.
  std::int64_t position() const { return position_; }
  /// Returns the bytes that were added since the last call.
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

/// The list of an archive's entries, which is read from its end.
class ZipReader {
 public:
  struct Entry {
    std::string name;  ///< The name without the archive's folder.
    std::int64_t header = 0;
    std::int64_t size = 0;
    bool is_compressed = false;
    /// The checksum of the data; nothing if torch was set to write none (torch.serialization.set_crc32_options).
    std::optional<std::uint32_t> crc32 = {};
  };

  /// The archive consists of the first `length` bytes that `read` gives. Errors begin with `what`. Throws Error for a list of more than 1
  /// MiB.
  ZipReader(ReadAt read, std::int64_t length, std::string what);

  /// Returns the entry of this name; null if there is none.
  const Entry* find(std::string_view name) const;
  /// Returns the entry of this name. Throws Error if there is none.
  const Entry& at(std::string_view name) const;
  /// Returns the position at which an entry's data begin. Throws Error if they are compressed, or do not lie in the archive.
  std::int64_t data_offset(const Entry& entry) const;
  /// Reads an entry's data. Throws Error also if their checksum is wrong.
  std::string data(const Entry& entry) const;
  const std::vector<Entry>& entries() const { return entries_; }

  [[noreturn]] void fail(const std::string& why) const;

 private:
  std::string read(std::int64_t offset, std::int64_t length) const;

  ReadAt read_;
  std::string what_;
  std::int64_t directory_ = 0;  // where the list begins, and all data end
  std::vector<Entry> entries_;
};

}  // namespace fsdp::ckpt
